"""What a body of OpenAI's Responses API means as a chat."""

import json

import pytest

from kiln.engine.server.protocol import ChatCompletionRequest
from kiln.engine.server.responses_api.body import ResponsesRequest
from kiln.engine.server.responses_api.translation import chat_request
from kiln.engine.text.replies.tool_choice import ToolChoice


def text(said):
    return {"type": "text", "text": said}


def chat_of(given, **fields):
    return chat_request(
        ResponsesRequest.model_validate_json(json.dumps({"input": given, **fields}))
    )


def messages_of(*items, **fields):
    return chat_of([*items], **fields)["messages"]


def call(number, arguments="{}"):
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": arguments}


def output(number, said):
    return {"type": "function_call_output", "call_id": f"c{number}", "output": said}


def test_a_text_is_a_users_message_behind_the_instructions():
    assert chat_of("hi", instructions="Be brief.")["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_messages_have_one_of_two_forms():
    made = messages_of(
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            **{"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"},
            "content": [
                {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
            ],
        },
    )
    assert made == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [text("hi")]},
        {"role": "assistant", "content": "hello"},
    ]


def test_the_items_of_one_turn_are_one_message():
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed"}
    made = messages_of(
        {"role": "user", "content": "hi"},
        {**thought, "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "I'll look"},
        call(1, '{"a": 1}'),
        call(2),
        output(1, "rain"),
        output(2, [{"type": "input_text", "text": "sun"}]),
        {**thought, "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "content": "Rain and sun."},
        {"role": "assistant", "content": "Anything else?"},
    )
    assert made[1] == {
        **{"role": "assistant", "content": "I'll look", "reasoning_content": "hm"},
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        ],
    }
    assert made[2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": [text("sun")]},
        {"role": "assistant", "content": "Rain and sun.", "reasoning_content": "so"},
        {"role": "assistant", "content": "Anything else?"},
    ]


def test_calls_without_text_are_a_message_without_content():
    [_, said] = messages_of({"role": "user", "content": "hi"}, call(1))
    assert said["content"] is None
    assert [one["id"] for one in said["tool_calls"]] == ["c1"]


def test_tools_and_sampling():
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    chat = chat_of(
        "hi",
        **{"model": "m", "max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9},
        **{"stream": True, "user": "me", "tool_choice": "none", "parallel_tool_calls": False},
        tools=[{"type": "function", **function}],
        reasoning={"effort": "low", "summary": "auto"},
    )
    del chat["messages"]
    assert chat == {
        **{"model": "m", "max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9},
        **{"stream": True, "user": "me", "tool_choice": "none", "parallel_tool_calls": False},
        **{"tools": [{"type": "function", "function": function}], "reasoning_effort": "low"},
    }


NAMED = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("choice", "meaning"),
    [
        ("required", ToolChoice("required")),
        (NAMED, ToolChoice("required", frozenset("f"), forced=True)),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [NAMED]},
            ToolChoice("required", frozenset("f")),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [NAMED, {**NAMED, "name": "g"}]},
            ToolChoice("auto", frozenset("fg")),
        ),
    ],
)
def test_calls_can_be_demanded(choice, meaning):
    tools = [{"type": "function", "name": name, "strict": True} for name in "fgh"]
    chat = ChatCompletionRequest.model_validate(chat_of("hi", tools=tools, tool_choice=choice))
    assert chat.chosen_tools == meaning
    assert [tool.function.strict for tool in chat.tools] == [True] * 3


@pytest.mark.parametrize("empty", [None, [], [{"type": "summary_text", "text": ""}]])
def test_reasoning_of_no_text_is_nothing(empty):
    [user] = messages_of({"role": "user", "content": "hi"}, {"type": "reasoning", "summary": empty})
    assert user["role"] == "user"
