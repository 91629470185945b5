"""No request stops the others: while it is dealt with, probes are answered and streams go on."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kiln.engine.server.serving import MAX_BODY_BYTES

JSON = {"Content-Type": "application/json"}
ROOM = MAX_BODY_BYTES - 200


def _repeat(before, unit, after):
    return before + unit * ((ROOM - len(before) - len(after)) // len(unit)) + after


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KILLERS = {
    "text": (COMPLETIONS, _repeat(b'{"prompt": "', b"word 7, ", b'"}')),
    "chat text": (
        CHAT,
        _repeat(b'{"messages": [{"role": "user", "content": "', b"word 7, ", b'"}]}'),
    ),
    "stop tokens": (COMPLETIONS, _repeat(b'{"prompt": [5], "stop_token_ids": [5', b",5", b"]}")),
    "token lists": (COMPLETIONS, _repeat(b'{"prompt": [[5]', b",[5]", b"]}")),
    "wrong messages": (CHAT, _repeat(b'{"messages": [1', b",1", b"]}")),
    "parts": (
        CHAT,
        _repeat(
            b'{"messages": [{"role": "user", "content": [{"type": "text", "text": ""}',
            b',{"type": "text", "text": ""}',
            b"]}]}",
        ),
    ),
    "tools": (CHAT, _repeat(b'{"messages": [], "tools": [{}', b",{}", b"]}")),
}


def cpu_seconds(pid):
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Poller(threading.Thread):
    """Asks /health/live over and over.

    ``longest`` is the most processor time that the server used before it answered one probe. A
    server that works on a request instead of answering uses as much on a busy machine as on a quiet
    one; one that waits for a core uses none.
    """

    def __init__(self, client, pid):
        super().__init__()
        self._pid = pid
        self._url = client.base_url.join("/health/live")
        self._over = threading.Event()
        self.longest = 0.0
        self.failed = []

    def run(self):
        with httpx.Client(timeout=60) as http:
            while not self._over.is_set():
                begun = cpu_seconds(self._pid)
                answer = http.get(self._url)
                self.longest = max(self.longest, cpu_seconds(self._pid) - begun)
                if answer.status_code != 200:
                    self.failed.append(answer.text)
                time.sleep(0.005)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self.join()


@pytest.mark.parametrize("name", KILLERS)
def test_probes_and_streams_go_on_beside_a_hostile_body(server_and_process, stream, name):
    server, process = server_and_process
    path, body = KILLERS[name]
    beside = {"prompt": [5, 6], "max_tokens": 60, "ignore_eos": True, "temperature": 0}

    def text():
        events = stream(server, COMPLETIONS, beside)
        return "".join(event["choices"][0]["text"] for event in events)

    alone = text()
    with (
        Poller(server, process.pid) as poller,
        ThreadPoolExecutor(3) as pool,
        httpx.Client(timeout=120) as http,
    ):
        url = server.base_url.join(path)
        hostile = [pool.submit(http.post, url, content=body, headers=JSON) for _ in range(2)]
        with_company = pool.submit(text).result()
        answers = [one.result() for one in hostile]
    assert {answer.status_code for answer in answers} == {400}
    assert all(len(answer.content) < 4096 for answer in answers)
    assert with_company == alone
    assert not poller.failed
    assert poller.longest < 1.0
