"""Reasoning, text and tool calls in the forms of Anthropic's API and of OpenAI's responses."""

from __future__ import annotations

import json

import pytest
from reply_texts import FORMATS, NOW, WEATHER
from writing_engine import Scribe, named_events, post, tokenizer_with_tools

from kiln.engine.errors import EngineDeadError, QueueFullError

HERMES = FORMATS[0]
REPLY = f"<think>Let me see.</think>I'll look.\n{HERMES.write([WEATHER, NOW])}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
MESSAGES = {
    "messages": [{"role": "user", "content": "What is the weather?"}],
    "max_tokens": 2000,
    "tools": [{"name": name, "input_schema": SCHEMA} for name in ("get_weather", "now")],
}
RESPONSES = {
    "input": "What is the weather?",
    "tools": [
        {"type": "function", "name": name, "parameters": SCHEMA} for name in ("get_weather", "now")
    ],
}
PATHS = {"/v1/messages": MESSAGES, "/v1/responses": RESPONSES}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folders):
    return tokenizer_with_tools(tokenizer_folders["byte-level"])


def whole(scribe, tokenizer, path, **fields):
    answer = post(scribe, tokenizer, path, {**PATHS[path], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(scribe, tokenizer, path, **fields):
    answer = post(scribe, tokenizer, path, {**PATHS[path], **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    return named_events(answer.text)


def blocks_of(events):
    """The content blocks that a stream of messages adds up to."""
    blocks, is_open = [], False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (event["index"], is_open) == (len(blocks), False)
                blocks.append({**event["content_block"], "json": ""})
                is_open = True
            case "content_block_delta":
                assert (event["index"], is_open) == (len(blocks) - 1, True)
                delta, block = event["delta"], blocks[-1]
                name = {"input_json_delta": "json", "text_delta": "text"}.get(delta["type"])
                name = name or delta["type"].removesuffix("_delta")
                block[name] += delta.get("partial_json", delta.get(name))
            case "content_block_stop":
                assert (event["index"], is_open) == (len(blocks) - 1, True)
                is_open = False
    assert not is_open
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return blocks


def without_ids(blocks):
    return [
        {name: value for name, value in block.items() if name not in ("id", "signature")}
        for block in blocks
    ]


def test_a_message_has_thinking_text_and_tool_use(tokenizer):
    answer = whole(Scribe(tokenizer, REPLY, cached=5), tokenizer, "/v1/messages")
    assert without_ids(answer["content"]) == [
        {"type": "thinking", "thinking": "Let me see."},
        {"type": "text", "text": "I'll look."},
        {"type": "tool_use", "name": "get_weather", "input": WEATHER[1]},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    assert answer["content"][0]["signature"]
    assert len({block["id"] for block in answer["content"][2:]}) == 2
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["usage"]["cache_read_input_tokens"] == 5


def test_a_streamed_message_adds_up_to_the_whole(tokenizer):
    answer = whole(Scribe(tokenizer, REPLY), tokenizer, "/v1/messages")
    events = streamed(Scribe(tokenizer, REPLY), tokenizer, "/v1/messages")
    assert [event["type"] for event in events[:3]] == [
        *("message_start", "ping", "content_block_start"),
    ]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks = blocks_of(events)
    assert without_ids(blocks) == without_ids(answer["content"])
    assert blocks[0]["signature"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == answer["usage"]


def test_thinking_that_is_omitted_has_no_text(tokenizer):
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
    answer = whole(Scribe(tokenizer, REPLY), tokenizer, "/v1/messages", **fields)
    assert without_ids(answer["content"])[0] == {"type": "thinking", "thinking": ""}
    events = streamed(Scribe(tokenizer, REPLY), tokenizer, "/v1/messages", **fields)
    assert without_ids(blocks_of(events)) == without_ids(answer["content"])


def test_a_call_that_is_cut_off_is_as_far_as_it_goes(tokenizer):
    text = HERMES.write([WEATHER])
    cut = text[: text.index('"days"')]
    answer = whole(Scribe(tokenizer, cut, end="length"), tokenizer, "/v1/messages")
    assert answer["content"][-1]["input"] == {"city": "Zürich"}
    assert answer["stop_reason"] == "max_tokens"
    answer = whole(Scribe(tokenizer, cut, end="length"), tokenizer, "/v1/responses")
    assert answer["output"][-1]["status"] == answer["status"] == "incomplete"
    assert answer["output"][-1]["arguments"] == '{"city": "Zürich", '


def test_tools_that_may_not_be_called_are_text(tokenizer):
    for choice in ({"type": "none"}, "none"):
        path = "/v1/messages" if isinstance(choice, dict) else "/v1/responses"
        answer = whole(Scribe(tokenizer, REPLY), tokenizer, path, tool_choice=choice)
        kinds = [one["type"] for one in answer.get("content", answer.get("output"))]
        assert kinds[1:] in (["text"], ["message"])


def test_a_response_has_reasoning_a_message_and_calls(tokenizer):
    answer = whole(Scribe(tokenizer, REPLY), tokenizer, "/v1/responses")
    reasoning, message, first, second = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "I'll look."
    assert [(one["type"], one["name"]) for one in (first, second)] == [
        ("function_call", "get_weather"),
        ("function_call", "now"),
    ]
    assert json.loads(first["arguments"]) == WEATHER[1]
    assert {one["status"] for one in answer["output"]} == {answer["status"]} == {"completed"}
    assert len({one["id"] for one in answer["output"]}) == 4
    details = answer["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < answer["usage"]["output_tokens"]


def test_a_streamed_response_adds_up_to_the_whole(tokenizer):
    answer = whole(Scribe(tokenizer, REPLY), tokenizer, "/v1/responses")
    events = streamed(Scribe(tokenizer, REPLY), tokenizer, "/v1/responses")
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    last = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    own = ("id", "call_id", "created_at", "output")
    assert {**last, **dict.fromkeys(own)} == {**answer, **dict.fromkeys(own)}
    for item, other in zip(done, answer["output"], strict=True):
        assert {**item, **dict.fromkeys(own)} == {**other, **dict.fromkeys(own)}
    kinds = ("response.function_call_arguments", "response.output_text", "response.reasoning_text")
    for kind in kinds:
        texts: dict[str, str] = {}
        for event in events:
            if event["type"] == f"{kind}.delta":
                texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        finals = [event for event in events if event["type"] == f"{kind}.done"]
        assert finals
        for event in finals:
            assert texts.get(event["item_id"]) == event.get("text", event.get("arguments"))


def test_only_the_last_item_of_a_cut_response_is_incomplete(tokenizer):
    """Also where the last token ends one item and begins the next."""
    scribe = Scribe(tokenizer, "<think>Let me see.</think>I", end="length")
    events = streamed(scribe, tokenizer, "/v1/responses")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == ["completed", "incomplete"]
    assert done == events[-1]["response"]["output"]


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_fails_late_ends_with_an_error_event(tokenizer, path):
    scribe = Scribe(tokenizer, "Hello", end=EngineDeadError("killed by signal 9"))
    last = streamed(scribe, tokenizer, path)[-1]
    if path == "/v1/messages":
        assert last["type"] == "error"
        assert last["error"] == {"type": "api_error", "message": "killed by signal 9"}
    else:
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["message"] == "killed by signal 9"


@pytest.mark.parametrize("path", PATHS)
def test_a_bad_schema_is_named_as_the_body_names_it(tokenizer, path):
    tool = dict(PATHS[path]["tools"][0])
    name = "input_schema" if path == "/v1/messages" else "parameters"
    tool[name] = {"type": "nonsense"}
    answer = post(Scribe(tokenizer, "x"), tokenizer, path, {**PATHS[path], "tools": [tool]})
    assert answer.status_code == 400
    assert f"tools[0].{name}" in answer.json()["error"]["message"]


def test_a_client_that_asks_for_a_thread_is_told_to_go_on_without(tokenizer):
    body = {**MESSAGES, "thread": {"type": "create"}}
    answer = post(Scribe(tokenizer, "x"), tokenizer, "/v1/messages", body)
    assert answer.status_code == 400
    details = answer.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_a_full_queue_is_529_in_anthropics_form(tokenizer):
    scribe = Scribe(tokenizer, "", end=QueueFullError("the queue is full"))
    answer = post(scribe, tokenizer, "/v1/messages", MESSAGES)
    assert answer.status_code == 529
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert answer.headers["retry-after"]
