"""What benchmarks and SDKs send is answered in the form that they read.

``client_bodies.json`` names where each body comes from: the client's source, or a real request.
"""

import json
from pathlib import Path

import httpx
import pytest

BODIES = json.loads((Path(__file__).parent / "client_bodies.json").read_text())
TOKENS = 12  # what each body asks for at most


@pytest.fixture(scope="module")
def http(agent_url):
    with httpx.Client(base_url=agent_url, timeout=60) as client:
        yield client


def _lines(http, path, body):
    """The data of a stream's events, read by lines as these clients do."""
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    return [line.removeprefix("data: ") for line in lines]


def _text(choice):
    return choice["text"] if "text" in choice else choice["delta"].get("content")


@pytest.mark.parametrize("one", BODIES, ids=[one["client"] for one in BODIES])
def test_a_clients_request_is_answered(http, one):
    check = {"/v1/responses": _check_responses, "/v1/messages": _check_messages}
    check = check.get(one["path"], _check_stream if one["body"].get("stream") else _check_whole)
    check(http, one["path"], one["body"])


def _check_whole(http, path, body):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["text"] if "text" in choice else choice["message"]["content"]
    assert answer.json()["usage"]["completion_tokens"] == TOKENS


def _check_stream(http, path, body):
    *chunks, done = _lines(http, path, body)
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    options = body.get("stream_options") or {}
    with_choices = [chunk for chunk in chunks if chunk["choices"]]
    assert "".join(_text(chunk["choices"][0]) or "" for chunk in with_choices)
    assert with_choices[-1]["choices"][0]["finish_reason"] == "length"
    if options.get("include_usage"):  # in a chunk of its own, behind all others
        assert chunks[:-1] == with_choices
        assert chunks[-1]["usage"]["completion_tokens"] == TOKENS
    else:
        assert chunks == with_choices
    if options.get("continuous_usage_stats"):
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == TOKENS
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


def _check_responses(http, path, body):
    events = [json.loads(line) for line in _lines(http, path, body)]
    deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
    assert "".join(deltas)
    assert events[-1]["type"] == "response.incomplete"  # the limit of tokens ended it
    assert events[-1]["response"]["usage"]["output_tokens"] == TOKENS


def _check_messages(http, path, body):
    events = [json.loads(line) for line in _lines(http, path, body)]
    deltas = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
    assert "".join(deltas)
    (end,) = [one for one in events if one["type"] == "message_delta"]
    assert end["delta"]["stop_reason"] == "max_tokens"
    assert end["usage"]["output_tokens"] == TOKENS
