"""Clients that leave, servers and replicas that die, and the end of examples/ray_serve."""

from __future__ import annotations

import json
import os
import signal

import httpx
import pytest
from ray_trials.cluster import parent_of

pytest.importorskip("ray.serve", reason='needs Ray: pip install -e ".[ray]"')

BODY = {
    "model": "sentence",
    "messages": [{"role": "user", "content": "What is 123 + 456?"}],
    "ignore_eos": True,
    "max_tokens": 1500,
}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(ray_serve, stream):
    body = {**BODY, "stream": stream, "n": 8}
    before = _tokens(ray_serve)
    url = f"{ray_serve.url}/v1/chat/completions"
    if stream:
        with httpx.stream("POST", url, json=body) as response:
            next(response.iter_raw())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=0.5)
    ray_serve.wait_until(lambda: _running(ray_serve) == 0, 10)
    assert _tokens(ray_serve) - before < 8 * 1500


def test_a_killed_server_is_replaced_while_the_other_replica_serves(ray_serve):
    body = {**BODY, "stream": True}
    with httpx.stream("POST", f"{ray_serve.url}/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        victim = _replica_of(response)
        os.kill(ray_serve.server_of(victim), signal.SIGKILL)
        last = [line for line in lines if line][-2:]
    assert json.loads(last[0][6:])["error"]["code"] == "engine_unavailable"
    assert last[1] == "data: [DONE]"

    def replaced() -> bool:
        assert _replica_of(_ask(ray_serve)) != victim  # no request that reached no engine is lost
        return len(ray_serve.alive() - {victim}) == 2

    ray_serve.wait_until(replaced)
    assert _sum(ray_serve, "kiln:router_failed_attempts_total", 'reason="lost"') >= 1


def test_a_killed_replica_leaves_no_server_and_is_replaced(ray_serve):
    victim = _replica_of(_ask(ray_serve))
    server = ray_serve.server_of(victim)
    os.kill(parent_of(server), signal.SIGKILL)
    ray_serve.wait_until(lambda: server not in ray_serve.processes(), 15)
    ray_serve.wait_until(lambda: len(ray_serve.alive() - {victim}) == 2)


def test_a_server_that_hangs_is_replaced(ray_serve):
    victim = _replica_of(_ask(ray_serve))
    server = ray_serve.server_of(victim)
    os.kill(server, signal.SIGSTOP)
    ray_serve.wait_until(lambda: server not in ray_serve.processes(), 90)
    ray_serve.wait_until(lambda: len(ray_serve.alive() - {victim}) == 2)


def test_ctrl_c_leaves_nothing(ray_serve):
    assert len(ray_serve.processes("kiln.engine.cli.main")) >= 2
    os.killpg(ray_serve.process.pid, signal.SIGINT)
    assert ray_serve.process.wait(60) == 0
    assert not ray_serve.processes()


def _ask(ray_serve) -> httpx.Response:
    body = {**BODY, "max_tokens": 3}
    return httpx.post(f"{ray_serve.url}/v1/chat/completions", json=body, timeout=60)


def _replica_of(response: httpx.Response) -> str:
    assert response.status_code == 200
    return response.headers["x-kiln-replica"]


def _sum(ray_serve, metric: str, label: str = "") -> float:
    lines = [line for line in ray_serve.metrics().splitlines() if line.startswith(f"{metric}{{")]
    assert lines
    return sum(float(line.split()[-1]) for line in lines if label in line)


def _running(ray_serve) -> float:
    return _sum(ray_serve, "kiln:num_requests_running")


def _tokens(ray_serve) -> float:
    return _sum(ray_serve, "kiln:generation_tokens_total")
