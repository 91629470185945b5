"""The command of examples/ray_serve with two replicas of the demo model on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import httpx
import pytest

pytest.importorskip("ray.serve", reason='needs Ray: pip install -e ".[ray]"')

QUESTION = [{"role": "user", "content": "What is 123 + 456?"}]
ANSWERS = {"demo": "579", "sentence": "The answer is 579.", "chatty": "I can do that: 579"}
LONG = {"ignore_eos": True, "max_tokens": 1500, "temperature": 0}


def ask(ray_serve, model: str, messages=QUESTION, **fields) -> httpx.Response:
    body = {"model": model, "messages": messages, "temperature": 0, **fields}
    return httpx.post(f"{ray_serve.url}/v1/chat/completions", json=body, timeout=60)


def replica_of(response: httpx.Response) -> str:
    assert response.status_code == 200
    return response.headers["x-kiln-replica"]


def test_whole_and_streamed_answers_of_the_model_and_its_adapters(ray_serve):
    for model, text in ANSWERS.items():
        assert ask(ray_serve, model).json()["choices"][0]["message"]["content"] == text
        streamed = ask(ray_serve, model, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *events, done = [line[6:] for line in streamed.text.splitlines() if line]
        deltas = [json.loads(one)["choices"][0]["delta"] for one in events]
        assert done == "[DONE]"
        assert "".join(delta.get("content") or "" for delta in deltas) == text


def test_events_arrive_one_by_one(ray_serve):
    body = {"model": "demo", "messages": QUESTION, "stream": True, **LONG}
    with httpx.stream("POST", f"{ray_serve.url}/v1/chat/completions", json=body) as response:
        arrivals = [time.monotonic() for _ in response.iter_raw()]
    assert len(arrivals) > 100
    assert arrivals[len(arrivals) // 2] - arrivals[0] > (arrivals[-1] - arrivals[0]) / 10


def test_requests_of_one_adapter_go_to_one_replica_and_other_adapters_to_the_other(ray_serve):
    time.sleep(1)  # until Ray has told its router which replicas have which adapters
    used = {
        model: {replica_of(ask(ray_serve, model, _question(number))) for number in range(10)}
        for model in ("sentence", "demo:chatty")
    }
    assert all(len(replicas) == 1 for replicas in used.values())
    assert used["sentence"] != used["demo:chatty"]


def test_the_turns_of_a_conversation_go_to_one_replica_and_conversations_to_both(ray_serve):
    used = []
    for conversation in range(8):
        messages = _question(conversation * 100)
        turns = set()
        for turn in range(3):
            turns.add(replica_of(ask(ray_serve, "demo", messages)))
            messages = [*messages, {"role": "assistant", "content": "1"}, *_question(turn)]
        used.append(turns)
    assert all(len(replicas) == 1 for replicas in used)
    assert len(set.union(*used)) == 2


def test_under_load_requests_of_one_adapter_use_both_replicas(ray_serve):
    async def ask_all() -> list[httpx.Response]:
        body = {"model": "sentence", "messages": QUESTION, **LONG, "max_tokens": 300}
        async with httpx.AsyncClient(timeout=120, base_url=ray_serve.url) as client:
            calls = (client.post("/v1/chat/completions", json=body) for _ in range(24))
            return await asyncio.gather(*calls)

    used = [replica_of(response) for response in asyncio.run(ask_all())]
    counts = {replica: used.count(replica) for replica in used}
    assert sorted(counts) == sorted(ray_serve.alive())
    assert max(counts.values()) <= 16


def test_errors_of_kiln_pass_unchanged(ray_serve):
    port = next(iter(ray_serve.replicas().values()))
    for path, body in (
        ("/v1/chat/completions", b'{"model": "nobody", "messages": []}'),
        ("/v1/chat/completions", b'{"model": "demo", "messages": 3}'),
        ("/v1/completions", b"{"),
        ("/v1/nothing", b"{}"),
    ):
        front, kiln = (
            httpx.post(base + path, content=body, headers={"Content-Type": "application/json"})
            for base in (ray_serve.url, f"http://127.0.0.1:{port}")
        )
        assert (front.status_code, front.content) == (kiln.status_code, kiln.content)
        assert front.status_code >= 400
        assert len(front.headers.get_list("x-request-id")) == 1


def test_routes_that_are_not_about_one_replica(ray_serve):
    url = ray_serve.url
    assert httpx.get(f"{url}/health").json() == {"status": "ready"}
    assert [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]] == list(ANSWERS)
    assert len(ray_serve.alive()) == 2
    for verb in ("load", "unload"):
        refused = httpx.post(f"{url}/v1/{verb}_lora_adapter", json={"lora_name": "x"})
        assert refused.status_code == 403
        assert "--lora-modules" in refused.json()["error"]["message"]
    assert httpx.post(f"{url}/v1/completions", content=b"x" * (5 << 20)).status_code == 413


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(ray_serve, stream):
    body = {"model": "demo", "messages": QUESTION, **LONG, "stream": stream, "n": 8}
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
    body = {"model": "sentence", "messages": QUESTION, **LONG, "stream": True}
    with httpx.stream("POST", f"{ray_serve.url}/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        victim = replica_of(response)
        os.kill(ray_serve.server_of(victim), signal.SIGKILL)
        last = [line for line in lines if line][-2:]
    assert json.loads(last[0][6:])["error"]["code"] == "engine_unavailable"
    assert last[1] == "data: [DONE]"

    killed = time.monotonic()

    def replaced() -> bool:
        response = ask(ray_serve, "sentence")
        if response.status_code == 503 and time.monotonic() < killed + 2:  # Ray does not know yet
            assert response.headers["retry-after"] == "5"
            return False
        assert replica_of(response) != victim
        return len(ray_serve.alive() - {victim}) == 2

    ray_serve.wait_until(replaced)


def test_a_killed_replica_leaves_no_server_and_is_replaced(ray_serve):
    victim = replica_of(ask(ray_serve, "chatty"))
    server = ray_serve.server_of(victim)
    os.kill(_parent(server), signal.SIGKILL)
    ray_serve.wait_until(lambda: server not in ray_serve.processes(), 15)
    ray_serve.wait_until(lambda: len(ray_serve.alive() - {victim}) == 2)


def test_a_server_that_hangs_is_replaced(ray_serve):
    victim = replica_of(ask(ray_serve, "chatty"))
    server = ray_serve.server_of(victim)
    os.kill(server, signal.SIGSTOP)
    ray_serve.wait_until(lambda: server not in ray_serve.processes(), 90)
    ray_serve.wait_until(lambda: len(ray_serve.alive() - {victim}) == 2)


def test_ctrl_c_leaves_nothing(ray_serve):
    assert len(ray_serve.processes("kiln.engine.cli.main")) >= 2
    os.killpg(ray_serve.process.pid, signal.SIGINT)
    assert ray_serve.process.wait(60) == 0
    ray_serve.wait_until(lambda: not ray_serve.processes(), 15)


def _question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {number} + {number + 1}?"}]


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def _sum(ray_serve, metric: str) -> float:
    lines = [line for line in ray_serve.metrics().splitlines() if line.startswith(f"{metric}{{")]
    assert lines
    return sum(float(line.split()[-1]) for line in lines)


def _running(ray_serve) -> float:
    return _sum(ray_serve, "kiln:num_requests_running")


def _tokens(ray_serve) -> float:
    return _sum(ray_serve, "kiln:generation_tokens_total")
