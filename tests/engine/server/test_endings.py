"""How a server ends: answers under way are finished or told, and no process is left."""

import json
import os
import signal
import time
from pathlib import Path

import agent_engine
import agent_model
import httpx
import pytest
from depth import at_depth
from metric_lines import value

COUNT = at_depth(24, 40)
COMPUTES = at_depth(False, True)  # by default, an engine that an ending needs
LONG = {"prompt": [[5, 6]] * COUNT, "max_tokens": at_depth(40, 100)}
LONG |= {"ignore_eos": True, "stream": True}


def _engine(process):
    """The pid of a server's engine process, and its socket folder."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in children:
        *_, folder, _config, _end = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if Path(folder.decode()).is_dir():
            return int(pid), Path(folder.decode())
    raise AssertionError("the server has no engine process")


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def quick_engine(tmp_path_factory):
    """A model, and a command that serves it with an engine that need not import torch."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    agent_model.write_folder(folder)
    return {"model": folder, "program": agent_engine.kiln_command(seconds=0.2)}


@pytest.fixture
def ending(start, quick_engine):
    """Start a server; after the test its engine is gone and its folder too."""

    class Ending:
        def __call__(self, *flags, computes=COMPUTES):
            own = {} if computes else quick_engine
            self.context = start("--max-num-seqs", "8", "--max-waiting", "64", *flags, **own)
            self.client, self.process = self.context.__enter__()
            self.engine, self.folder = _engine(self.process)
            assert _is_running(self.engine)
            assert self.folder.is_dir()
            return self

    made = Ending()
    yield made
    code = made.process.wait(60)
    made.context.__exit__(None, None, None)
    assert code == made.expected
    assert not _is_running(made.engine)
    assert not made.folder.exists()


def _read(lines):
    return [line.removeprefix("data: ") for line in lines if line]


def _wait_until_refused(server):
    """Wait until the server has acted on a signal: it takes no new connection."""
    deadline = time.monotonic() + 60
    while True:
        try:
            httpx.get(server.client.base_url.join("/health/ready"), timeout=120)
        except httpx.HTTPError:
            return
        assert time.monotonic() < deadline, "the server still takes connections"
        time.sleep(0.02)


def test_a_signal_lets_answers_finish_and_takes_no_more(ending):
    server = ending(computes=True)
    server.expected = 0
    with server.client.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        _wait_until_refused(server)
        data = _read(lines)
    assert data[-1] == "[DONE]"
    chunks = [json.loads(item) for item in data[:-1]]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons.count("length") == COUNT


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_what_cannot_finish_in_time_is_told(ending, how):
    server = ending("--shutdown-timeout", "0.2" if how == "timeout" else "60")
    server.expected = 0
    with server.client.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            _wait_until_refused(server)
            server.process.send_signal(signal.SIGINT)
        data = _read(lines)
    assert data[-1] == "[DONE]"
    assert "shutting down" in json.loads(data[-2])["error"]["message"]


def _end_engine(server, how=signal.SIGKILL):
    """Kill or stop the engine under a stream, and return the error that the stream ends with."""
    with server.client.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(server.engine, how)
        data = _read(lines)
    assert data[-1] == "[DONE]"
    return json.loads(data[-2])["error"]


def _probes(server):
    """The status and the code of both probes and of a request."""
    answers = [
        server.client.get("/health/live"),
        server.client.get("/health/ready"),
        server.client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}),
    ]
    return [
        (one.status_code, one.json().get("error", {}).get("code"), one.headers.get("Retry-After"))
        for one in answers
    ]


def test_a_dead_engine_is_told_to_its_clients_and_ends_a_server_without_restarts(ending):
    server = ending("--max-restarts", "0")
    server.expected = 1
    error = _end_engine(server)
    assert "signal 9" in error["message"]
    assert error["code"] == "engine_unavailable"


@pytest.mark.parametrize("how", at_depth([signal.SIGKILL], [signal.SIGKILL, signal.SIGSTOP]))
def test_a_dead_or_frozen_engine_is_restarted_and_probes_say_so(ending, how):
    server = ending()
    server.expected = 0
    error = _end_engine(server, how)
    assert ("signal 9" if how is signal.SIGKILL else "SIGSTOP") in error["message"]
    restarting = (503, "restarting", "5")
    assert _probes(server) == [(200, None, None), restarting, restarting]
    deadline = time.monotonic() + 60
    while _probes(server)[1][0] != 200:
        assert time.monotonic() < deadline, "the engine is not restarted"
        time.sleep(0.05)
    assert not _is_running(server.engine)
    assert not server.folder.exists()
    assert _probes(server) == [(200, None, None)] * 3
    assert value(server.client.get("/metrics").text, "kiln:engine_restarts_total") == 1
    server.engine, server.folder = _engine(server.process)
    server.process.send_signal(signal.SIGTERM)


def test_a_signal_ends_a_server_during_a_restart_at_once(ending):
    server = ending("--shutdown-timeout", "3600")
    server.expected = 0
    _end_engine(server)
    assert _probes(server)[1][:2] == (503, "restarting")
    server.process.send_signal(signal.SIGTERM)


def test_a_killed_server_leaves_no_engine(ending):
    server = ending()
    server.expected = -signal.SIGKILL
    server.process.kill()
    deadline = time.monotonic() + 60
    while _is_running(server.engine) and time.monotonic() < deadline:
        time.sleep(0.05)
