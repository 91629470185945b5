"""SGLang's gateway in front of two ``kiln serve`` processes, as the documents describe it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest
from client_environments import environment

from kiln.engine.cli.local_server import local_server

pytestmark = pytest.mark.deep

FLAGS = (
    "--policy cache_aware --health-check-endpoint /health/ready --health-check-interval-secs 1 "
    "--health-failure-threshold 1 --health-success-threshold 1 --disable-retries "
    "--worker-startup-check-interval 1 --prometheus-host 127.0.0.1"
)
SYSTEM = {"role": "system", "content": "You add numbers. " * 40}
LONG = {"max_tokens": 300, "ignore_eos": True}


@dataclass
class Gateway:
    """A running gateway, and the servers behind it by their URLs."""

    url: str
    servers: dict[str, subprocess.Popen[str]]

    def ask(self, text: str, **fields) -> httpx.Response:
        messages = [SYSTEM, {"role": "user", "content": text}]
        body = {"model": "demo", "messages": messages, "temperature": 0, **fields}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def wait_until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not so after {seconds:g} s"
        time.sleep(0.1)


def is_served(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def answered(url: str) -> float:
    """Return how many prompts a server has read."""
    text = httpx.get(f"{url}/metrics").text
    return sum(float(n) for n in re.findall(r"^kiln:request_success_total\{.*\} (\S+)", text, re.M))


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with ExitStack() as stack:
        # The gateway adds fields of SGLang's, such as no_stop_trim.
        flags = ["--device", "cpu", "--kv-memory-gib", "0.25", "--ignore-unknown-fields"]
        servers = dict(stack.enter_context(local_server(flags)) for _ in range(2))
        command, port = environment("sglang_router").command, free_port()
        launch = [*command, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
        process = subprocess.Popen(
            [
                *(*launch, "--port", str(port), "--prometheus-port", str(free_port())),
                *(*FLAGS.split(), "--worker-urls", *servers),
            ],
            stdout=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        made = Gateway(f"http://127.0.0.1:{port}", servers)
        wait_until(lambda: is_served(made.url))
        wait_until(lambda: made.ask("1 + 1").status_code == 200)
        yield made


def test_whole_and_streamed_answers_and_errors_pass(gateway):
    whole = gateway.ask("What is 123 + 456?")
    assert "choices" in whole.json()
    streamed = gateway.ask("What is 123 + 456?", stream=True)
    *events, done = [line[6:] for line in streamed.text.splitlines() if line]
    assert done == "[DONE]"
    text = "".join(json.loads(one)["choices"][0]["delta"].get("content") or "" for one in events)
    assert text == whole.json()["choices"][0]["message"]["content"]
    assert gateway.ask("x", max_tokens=-1).status_code == 400


def test_prompts_with_the_same_beginning_go_to_one_server(gateway):
    before = {url: answered(url) for url in gateway.servers}
    for number in range(10):
        assert gateway.ask(f"What is {number} + 1?").status_code == 200
    grown = [answered(url) - before[url] for url in gateway.servers]
    assert sorted(grown) == [0, 10]


def test_a_server_that_drains_finishes_its_streams_and_gets_no_more(gateway):
    server = next(iter(gateway.servers.values()))
    with httpx.stream(
        "POST",
        f"{gateway.url}/v1/chat/completions",
        json={"model": "demo", "messages": [SYSTEM], "stream": True, **LONG},
        timeout=120,
    ) as response:
        lines = response.iter_lines()
        next(lines)
        server.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.wait(60) == 0
    time.sleep(3)  # until the gateway has asked for the health again
    assert [gateway.ask(f"{number}").status_code for number in range(5)] == [200] * 5
