"""The field priority over HTTP: it reaches the engine, or is refused by name."""

from __future__ import annotations

import pytest
from writing_engine import Scribe, post, tokenizer_with_tools

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/completions": {"prompt": [5], "max_tokens": 3},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folders):
    return tokenizer_with_tools(tokenizer_folders["byte-level"])


@pytest.mark.parametrize("path", BODIES)
def test_the_priority_reaches_the_engine(tokenizer, path):
    for priority in (-3, 2**63 - 1, None):
        scribe = Scribe(tokenizer, "x")
        answer = post(scribe, tokenizer, path, {**BODIES[path], "priority": priority})
        assert answer.status_code == 200, answer.text
        assert [request.priority for request in scribe.requests] == [priority or 0]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_first_come_first_served_refuses_other_priorities_than_0(server, path, streams):
    body = {**BODIES[path], "stream": streams}
    assert server.post(path, json={**body, "priority": 0}).status_code == 200
    answer = server.post(path, json={**body, "priority": 5})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "priority"
    assert error["message"].startswith("priority is 5, but priority scheduling is not enabled")
    assert "--scheduling-policy priority" in error["message"]


def test_messages_have_no_priority(server):
    body = {"messages": MESSAGES, "max_tokens": 3, "priority": 0}
    answer = server.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert "priority" in answer.json()["error"]["message"]


@pytest.mark.parametrize("wrong", [2**63, -(2**63), 1.5, "1", True])
def test_a_priority_is_a_64_bit_integer(server, wrong):
    answer = server.post("/v1/completions", json={**BODIES["/v1/completions"], "priority": wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"


@pytest.mark.deep
def test_by_priority_any_is_served_and_changes_no_answer(start):
    with start("--scheduling-policy", "priority", "--max-num-seqs", "2") as (client, _):
        for path, body in BODIES.items():
            texts = set()
            for priority in (None, 0, 5, -(2**62)):
                fields = {**body, "temperature": 0, "priority": priority}
                answer = client.post(path, json=fields)
                assert answer.status_code == 200, answer.text
                whole = answer.json()
                choice = whole.get("choices", whole.get("output"))[0]
                texts.add(str(choice.get("text") or choice.get("message") or choice["content"]))
            assert len(texts) == 1
