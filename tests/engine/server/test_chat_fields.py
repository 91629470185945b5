"""The fields of a chat reach the template, and clients of other servers are understood."""

from __future__ import annotations

import json

import pytest

from kiln.engine.errors import RequestError
from kiln.engine.server.protocol import ChatCompletionRequest
from kiln.engine.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.name }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}"
    "{% endfor %}{{ (tools or []) | tojson }}{{ reasoning_effort }}"
    "{{ enable_thinking }}{% if add_generation_prompt %}<answer>{% endif %}"
)
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def prompt(model_folder):
    tokenizer = Tokenizer.load(model_folder, TEMPLATE)

    def read(**body):
        text = json.dumps({"messages": [USER], **body})
        (prompt,) = ChatCompletionRequest.model_validate_json(text).read_prompts(tokenizer, 9999)
        assert prompt.token_ids == tokenizer.encode(
            prompt.text, bool(body.get("add_special_tokens"))
        )
        return prompt.text

    return read


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "<user>hi[]<answer>"),
        ({"add_generation_prompt": False}, "<user>hi[]"),
        ({"continue_final_message": True}, "<user>hi"),
        ({"continue_final_message": False, "add_generation_prompt": True}, "<user>hi[]<answer>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<user>hi[]False<answer>"),
        ({"reasoning_effort": "low"}, "<user>hi[]low<answer>"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "<user>hi[]high<answer>",
        ),
        ({"tools": [TOOL]}, f"<user>hi[{json.dumps(TOOL)}]<answer>"),
        ({"tools": [TOOL], "tool_choice": "auto"}, f"<user>hi[{json.dumps(TOOL)}]<answer>"),
        ({"tools": [TOOL], "tool_choice": "none"}, "<user>hi[]<answer>"),
        ({"tools": [TOOL], "parallel_tool_calls": True}, f"<user>hi[{json.dumps(TOOL)}]<answer>"),
        ({"tools": []}, "<user>hi[]<answer>"),
        ({"add_special_tokens": True}, "<user>hi[]<answer>"),
    ],
)
def test_fields_of_a_chat_change_its_prompt(prompt, body, expected):
    assert prompt(**body) == expected


def test_a_history_of_calls_is_read(prompt):
    function = {"name": "f", "arguments": '{"city": "Rome"}', "parsed_arguments": {"city": "Rome"}}
    call = {"id": "c", "type": "function", "function": function, "index": 0}
    replayed = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    replayed["parsed"] = None  # like parsed_arguments, from the stream helpers of OpenAI's clients
    messages = [
        {"role": "developer", "content": "d"},
        {**USER, "name": None, "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "r", **replayed},
        {
            "role": "tool",
            "tool_call_id": "c",
            "name": "f",
            "content": [{"type": "text", "text": "9"}],
        },
        {"role": "assistant", "tool_calls": []},
        {**USER, "name": "ann", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
    ]
    expected = "<developer>d<user>hi<assistant>Rome<tool>9f<assistant><user>aann[]<answer>"
    assert prompt(messages=messages) == expected


def test_half_a_surrogate_in_the_arguments_of_a_call_is_refused(prompt):
    function = {"name": "f", "arguments": '{"city": "\\ud800"}'}
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        prompt(messages=[USER, called])


# What other servers' load generators send, less the addresses of their servers.
BODIES = {
    "vllm bench": {"model": "tiny", "prompt": "hi", "repetition_penalty": 1.0, "max_tokens": 3,
                   "logprobs": None, "stream": True, "stream_options": {"include_usage": True},
                   "ignore_eos": True, "temperature": 0.0, "best_of": 1},
    "vllm bench chat": {"model": "tiny", "messages": [{"role": "user", "content": [
                            {"type": "text", "text": "hi"}]}],
                        "max_completion_tokens": 3, "stream": True, "ignore_eos": True,
                        "stream_options": {"include_usage": True}, "temperature": 0.0},
    "sglang bench": {"model": "tiny", "prompt": "hi", "temperature": 0.0, "best_of": 1,
                     "max_tokens": 3, "stream": True, "ignore_eos": True},
    "sglang bench chat": {"model": "tiny", "messages": [USER], "temperature": 0.0,
                          "max_completion_tokens": 3, "stream": True, "ignore_eos": True},
    "guidellm": {"model": "tiny", "prompt": "hi", "max_tokens": 3, "stop": None, "stream": True,
                 "ignore_eos": True,
                 "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "guidellm chat": {"model": "tiny", "messages": [USER], "max_completion_tokens": 3,
                      "stop": None, "ignore_eos": True, "stream": True,
                      "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "aiperf": {"model": "tiny", "prompt": ["hi"], "stream": True, "max_tokens": 3,
               "ignore_eos": True, "min_tokens": 3, "stream_options": {"include_usage": True}},
    "aiperf chat": {"model": "tiny", "messages": [{"role": "user", "name": None, "content": "hi"}],
                    "stream": True, "max_completion_tokens": 3, "min_tokens": 3,
                    "ignore_eos": True, "stream_options": {"include_usage": True}},
    "defaults of clients": {"prompt": "hi", "max_tokens": 3, "stream": True, "ignore_eos": True,
                            "logprobs": False, "stream_options": {}, "priority": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_the_bodies_of_load_generators_are_served(api, stream, name):
    body = BODIES[name]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    events = stream(api, path, body)
    options = body.get("stream_options") or {}
    if options.get("include_usage"):
        assert events[-1]["usage"]["completion_tokens"] == 3
    running = [event["usage"] for event in events[:-1] if event.get("usage")]
    if options.get("continuous_usage_stats"):
        counts = [usage["completion_tokens"] for usage in running]
        assert len(counts) == len(events) - 1
        assert counts == sorted(counts)
        assert counts[-1] == 3
    else:
        assert not running
    plain = {**body, "stream": False, "stream_options": {"include_usage": False}}
    assert api.post(path, json=plain).json()["usage"]["completion_tokens"] == 3


IDS = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "seed": 1, "n": 2}


def test_the_token_ids_of_a_chat_are_those_of_its_stream(api, stream, tokenizer):
    body = {"messages": [USER], **IDS}
    whole = api.post("/v1/chat/completions", json=body).json()
    assert whole["prompt_token_ids"] == tokenizer.apply_chat_template([USER])
    events = stream(api, "/v1/chat/completions", body)
    assert [event.get("prompt_token_ids") for event in events] == [
        whole["prompt_token_ids"], *[None] * (len(events) - 1),
    ]  # fmt: skip
    assert _ids(events) == [choice["token_ids"] for choice in whole["choices"]]
    assert [len(ids) for ids in _ids(events)] == [6, 6]


def test_the_token_ids_of_completions_are_those_of_their_stream(api, stream):
    body = {"prompt": [[5], [6, 7]], **IDS}
    whole = api.post("/v1/completions", json=body).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == [[5], [5], [6, 7], [6, 7]]
    events = stream(api, "/v1/completions", body)
    assert _ids(events) == [choice["token_ids"] for choice in whole]
    for index, choice in enumerate(whole):
        given = [one.get("prompt_token_ids") for one in _choices(events) if one["index"] == index]
        assert given == [choice["prompt_token_ids"], *[None] * (len(given) - 1)]


def _choices(events):
    return [choice for event in events for choice in event["choices"]]


def _ids(events):
    ids: dict[int, list[int]] = {}
    for choice in _choices(events):
        ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    return [ids[index] for index in sorted(ids)]


def test_a_server_may_have_another_template_and_ignore_unknown_fields(opened):
    unknown = {"made_up": 1, "stream_options": {"x": 2}}
    body = {"messages": [{**USER, "mood": "!"}], "max_tokens": 1, **unknown}
    answer = opened.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 2
    wrong = opened.post("/v1/chat/completions", json={**body, "temperature": "x"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
