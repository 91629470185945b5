"""OpenAI's Responses API: whole and streamed answers, and what is not kept."""

import json

import pytest

PATH = "/v1/responses"
BODY = {"input": "tell me more", "max_output_tokens": 12, "temperature": 0}


def streamed(client, body):
    """The data of a stream's events; each event's name is its type."""
    with client.stream("POST", PATH, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        text = response.read().decode()
    events = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert [name for name, _ in events] == [f"event: {one['type']}" for one in data]
    return data


def test_an_answer_is_a_response(api):
    answer = api.post(PATH, json=BODY).json()
    messages = [{"role": "user", "content": BODY["input"]}]
    chat = {"messages": messages, "max_tokens": 12, "temperature": 0}
    said = api.post("/v1/chat/completions", json=chat).json()
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["model"]) == ("response", "tiny")
    [item] = answer["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    text = said["choices"][0]["message"]["content"]
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    assert item["content"] == [part]
    assert answer["usage"]["input_tokens"] == said["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == said["usage"]["completion_tokens"]
    assert (answer["store"], answer["temperature"]) == (False, 0.0)


def test_a_stream_is_the_answer_in_parts(api):
    whole = api.post(PATH, json=BODY).json()
    events = streamed(api, BODY)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 0
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", whole["status"]),
    ]
    texts = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
    last, item = events[-1]["response"], events[-2]["item"]
    assert "".join(texts) == last["output"][0]["content"][0]["text"]
    assert [item] == last["output"]
    assert item["content"] == whole["output"][0]["content"]
    assert events[0]["response"]["status"] == "in_progress"
    assert {one["item_id"] for one in events if "item_id" in one} == {item["id"]}
    own = ("id", "created_at", "output")
    assert {**last, **dict.fromkeys(own)} == {**whole, **dict.fromkeys(own)}


def test_a_cut_answer_is_incomplete(api):
    answer = api.post(PATH, json={**BODY, "max_output_tokens": 1}).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert streamed(api, {**BODY, "max_output_tokens": 1})[-1]["type"] == "response.incomplete"


def test_what_has_no_effect_is_accepted_and_repeated(api):
    neutral = {
        **{"metadata": {"a": "b"}, "store": False, "truncation": "disabled", "user": "me"},
        **{"parallel_tool_calls": True, "service_tier": "auto", "background": False},
        **{"prompt_cache_key": "k", "safety_identifier": "s", "previous_response_id": None},
        "reasoning": {"effort": None, "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": False, "include_usage": True},
    }
    answer, plain = (api.post(PATH, json={**BODY, **more}).json() for more in (neutral, {}))
    assert answer["output"][0]["content"] == plain["output"][0]["content"]
    for name in ("metadata", "store", "user", "prompt_cache_key", "text"):
        assert answer[name] == neutral[name]


WRONG = [
    ({}, "input", "input: is required"),
    ({"input": ""}, "input", "needs a text"),
    ({"input": []}, "input", "needs a text"),
    ({**BODY, "store": True}, "store", "not kept here"),
    ({**BODY, "background": True}, "background", "not kept here"),
    ({**BODY, "previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
    ({**BODY, "conversation": {"id": "c"}}, "conversation", "whole conversation"),
    ({**BODY, "truncation": "auto"}, "truncation", "not supported"),
    ({**BODY, "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
    ({**BODY, "max_output_tokens": 10_000}, "max_output_tokens", "at most"),
    ({**BODY, "temperature": -1}, "temperature", "temperature"),
    ({**BODY, "messages": []}, "messages", "not a known field"),
    ({**BODY, "tools": [{"type": "web_search"}]}, None, "must be 'function', got 'web_search'"),
    ({**BODY, "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({**BODY, "tool_choice": {"type": "function"}}, "tool_choice.name", "is required"),
    ({**BODY, "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is required"),
    ({**BODY, "text": {"format": {"type": "xml"}}}, "text.format.type", "'text'"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, None, "got 'item_reference'"),
    ({"input": [{"role": "tool", "content": "x"}]}, None, "got 'tool'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "'input_image'"),
    ({"input": [{"type": "message", "role": "user"}]}, None, "content: is required"),
    ({"input": 5}, "input", "must be a string"),
]


@pytest.mark.parametrize(("body", "param", "part"), WRONG)
def test_a_wrong_body_is_400_and_names_the_field(api, body, param, part):
    answer = api.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param in (None, error["param"])
    assert part in error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/resp_1"),
        ("DELETE", "/resp_1"),
        ("GET", "/resp_1/input_items"),
        ("POST", "/resp_1/cancel"),
    ],
)
def test_no_response_is_kept(api, method, path):
    answer = api.request(method, PATH + path)
    assert answer.status_code == 404
    assert "'resp_1'" in answer.json()["error"]["message"]
    assert "not kept" in answer.json()["error"]["message"]
