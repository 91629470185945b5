"""Anthropic's Messages API: whole and streamed answers, and errors in its envelope."""

import json

import pytest

PATH = "/v1/messages"
USER = [{"role": "user", "content": "hello"}]
BODY = {"messages": USER, "max_tokens": 12, "temperature": 0}


def streamed(client, body, path=PATH):
    """The events of a stream as (name, data)."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        text = response.read().decode()
    events = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    for name, data in events:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    return [json.loads(data.removeprefix("data: ")) for _, data in events]


def test_an_answer_is_a_message(api):
    answer = api.post(PATH, json=BODY).json()
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    chat = api.post("/v1/chat/completions", json=BODY).json()
    text = chat["choices"][0]["message"]["content"]
    assert answer["content"] == ([{"type": "text", "text": text}] if text else [])
    ended = {"stop": "end_turn", "length": "max_tokens"}
    assert answer["stop_reason"] == ended[chat["choices"][0]["finish_reason"]]
    assert answer["stop_sequence"] is None
    assert answer["usage"] == {
        "input_tokens": chat["usage"]["prompt_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": chat["usage"]["completion_tokens"],
    }


def prompt_tokens(usage):
    """The tokens of a prompt; ``input_tokens`` are those that were not cached."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_stream_is_the_answer_in_parts(api):
    body = {**BODY, "messages": [{"role": "user", "content": "tell me more"}]}
    whole = api.post(PATH, json=body).json()
    events = streamed(api, body)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 0
    assert kinds == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start, end = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert prompt_tokens(start["usage"]) == prompt_tokens(whole["usage"])
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == whole["content"][0]["text"]
    assert end["delta"]["stop_reason"] == whole["stop_reason"]
    assert prompt_tokens(end["usage"]) == prompt_tokens(whole["usage"])
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_why_an_answer_ended(api):
    body = {**BODY, "messages": [{"role": "user", "content": "tell me more"}]}
    cut = api.post(PATH, json={**body, "max_tokens": 1}).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    text = api.post(PATH, json=body).json()["content"][0]["text"]
    sequence = text[1:3]
    stopped = api.post(PATH, json={**body, "stop_sequences": ["zzz", sequence]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", sequence)
    assert streamed(api, {**body, "stop_sequences": [sequence]})[-2]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": sequence,
        "stop_details": None,
    }


def test_counting_tokens_is_what_the_prompt_has(api):
    body = {"messages": USER, "system": "Be brief."}
    answer = api.post(PATH, json={**body, "max_tokens": 1}).json()
    counted = api.post(f"{PATH}/count_tokens", json=body).json()
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
    long = {"messages": [{"role": "user", "content": "word " * 1000}]}
    assert api.post(f"{PATH}/count_tokens", json=long).json()["input_tokens"] > 1000


def test_a_last_message_of_the_assistant_is_continued(api):
    messages = [*USER, {"role": "assistant", "content": "The answer is"}]
    answer = api.post(PATH, json={**BODY, "messages": messages}).json()
    begun = {"add_generation_prompt": False, "continue_final_message": True}
    counted = api.post("/tokenize", json={"messages": messages, **begun}).json()["count"]
    assert prompt_tokens(answer["usage"]) == counted
    assert counted < api.post("/tokenize", json={"messages": messages}).json()["count"]


def test_what_has_no_effect_is_accepted(api):
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    neutral = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", **ephemeral}]}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "me"},
        "service_tier": "standard_only",
        "container": None,
        **ephemeral,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01,b"}
    answer = api.post(PATH, json={**BODY, **neutral}, headers=headers)
    assert answer.json()["content"] == api.post(PATH, json=BODY).json()["content"]


def _said(*blocks):
    return [{"role": "assistant", "content": [*blocks]}]


def _told(*blocks):
    return [{"role": "user", "content": [*blocks]}]


FORM = {"type": "json_schema", "schema": {"type": "object"}}
WRONG = [
    ({"messages": USER}, "max_tokens: is required"),
    ({"max_tokens": 5}, "messages: is required"),
    ({**BODY, "messages": []}, "messages: needs at least one"),
    ({**BODY, "max_tokens": 0}, "max_tokens"),
    ({**BODY, "max_tokens": 10_000}, "max_tokens"),
    ({**BODY, "temperature": 1.5}, "temperature"),
    ({**BODY, "top_p": 0}, "top_p"),
    ({**BODY, "stop_sequences": [""]}, "stop_sequences"),
    ({**BODY, "stop": ["x"]}, "stop: is not a known field"),
    ({**BODY, "temprature": 1}, "did you mean temperature?"),
    ({**BODY, "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({**BODY, "tool_choice": {"type": "tool"}}, "tool_choice.name: is required"),
    ({**BODY, "tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name"),
    ({**BODY, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "got 'bash_20250124'"),
    ({**BODY, "output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({**BODY, "output_config": {"format": {"type": "json"}}}, "output_config.format.type"),
    ({**BODY, "output_format": FORM, "output_config": {"format": FORM}}, "output_format: cannot"),
    ({**BODY, "thinking": {"type": "sometimes"}}, "thinking.type"),
    ({**BODY, "mcp_servers": [{}]}, "mcp_servers"),
    ({**BODY, "thread": {"type": "create"}}, "thread: conversations are not kept"),
    ({**BODY, "messages": [{"role": "tool", "content": "x"}]}, "got 'tool'"),
    ({**BODY, "messages": _told({"type": "image", "source": {}})}, "got 'image'"),
    ({**BODY, "messages": _told({"type": "document"})}, "got 'document'"),
    ({**BODY, "messages": _told({"type": "thinking", "thinking": ""})}, "got 'thinking'"),
    ({**BODY, "messages": _said({"type": "tool_result", "tool_use_id": "x"})}, "'tool_result'"),
    ({**BODY, "messages": [7]}, "messages[0]: must be an object"),
    ({**BODY, "system": [{"type": "image"}]}, "got 'image'"),
    ([], "must be a JSON object"),
]


@pytest.mark.parametrize(("body", "part"), WRONG)
def test_a_wrong_body_is_400_and_names_the_field(api, body, part):
    answer = api.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error"
    assert part in told["error"]["message"]


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
def test_errors_have_anthropics_types(api, path):
    def sent(method="POST", **options):
        answer = api.request(method, path, **options)
        assert set(answer.json()) == {"type", "error"}
        assert set(answer.json()["error"]) == {"type", "message"}
        return answer.status_code, answer.json()["error"]["type"]

    body = BODY if path == PATH else {"messages": USER}
    assert sent(json={**body, "model": "gpt-9"}) == (404, "not_found_error")
    assert sent(method="GET") == (405, "invalid_request_error")
    assert sent(content=b"{}") == (415, "invalid_request_error")
    big = {"content": b" " * (4 * 2**20 + 1), "headers": {"Content-Type": "application/json"}}
    assert sent(**big) == (413, "request_too_large")
