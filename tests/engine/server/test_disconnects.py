"""A client that leaves frees what it held long before its answers would have been done."""

import json
import socket
import time

import pytest

# 80 answers of 120 tokens, one at a time: many seconds of work, nearly all of it queued.
COUNT, TOKENS = 80, 120
LONG = {"prompt": [[5, 6]] * COUNT, "max_tokens": TOKENS, "ignore_eos": True}
_PATIENCE = 60  # seconds, on however busy a machine


@pytest.fixture(scope="module")
def api(start):
    """A server that runs one request at a time."""
    with start("--max-num-seqs", "1") as (client, _):
        yield client
        answer = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
        assert answer.status_code == 200


@pytest.fixture
def busy(metric):
    """Wait until work is under way and more waits, so that nothing ends by itself."""

    def wait(client, waiting=10):
        deadline = time.monotonic() + _PATIENCE
        # Blocks too: between one request's end and the next one's first step none is in use.
        while metric(client, "num_requests_waiting") < waiting or not metric(
            client, "kv_blocks_used"
        ):
            assert time.monotonic() < deadline, "the work never began"
            time.sleep(0.01)

    return wait


def _leave_after(ready, client, body):
    """Send a body over a connection of its own, and close that once ``ready`` returns."""
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    address = (client.base_url.host, client.base_url.port)
    with socket.create_connection(address, timeout=_PATIENCE) as connection:
        connection.sendall(head.encode() + data)
        ready()


def test_a_stream_that_is_left(api, busy, until_idle, metric):
    before = metric(api, "generation_tokens_total")
    with api.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        busy(api)
    until_idle(api)
    assert metric(api, "num_requests_waiting") == 0
    after = metric(api, "generation_tokens_total")
    assert after - before < COUNT * TOKENS / 2, "the answers were finished for nobody"
    time.sleep(0.2)
    assert metric(api, "generation_tokens_total") == after


def test_an_answer_in_one_piece_that_is_left(api, busy, until_idle, metric):
    before = metric(api, "generation_tokens_total")
    _leave_after(lambda: busy(api), api, LONG)
    until_idle(api)
    done = metric(api, "generation_tokens_total") - before
    assert done < COUNT * TOKENS / 2, "the answers were finished for nobody"
    assert metric(api, "num_requests_waiting") == 0


@pytest.mark.parametrize("streaming", [True, False])
def test_a_queued_request_that_is_left(api, busy, until_idle, metric, streaming):
    def in_flight():
        return metric(api, "num_requests_waiting") + metric(api, "num_requests_running")

    with api.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()  # kept: a collected iterator closes the connection
        next(lines)
        busy(api)

        def queued():
            deadline = time.monotonic() + _PATIENCE
            while in_flight() <= COUNT:  # the others are no more than that
                assert time.monotonic() < deadline
                time.sleep(0.01)

        before = metric(api, "generation_tokens_total")
        body = {"prompt": [[9]] * 30, "max_tokens": 100, "stream": streaming, "ignore_eos": True}
        _leave_after(queued, api, body)
        deadline = time.monotonic() + _PATIENCE
        while in_flight() > COUNT:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert metric(api, "num_requests_waiting") > 0, "the others still wait"
        done = metric(api, "generation_tokens_total") - before
        assert done < 15 * TOKENS, "30 of the others ended by themselves"
    until_idle(api)
