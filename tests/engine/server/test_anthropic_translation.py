"""What a body of Anthropic's Messages API means as a chat."""

import json

import pytest

from kiln.engine.server.anthropic.body import CountTokensRequest, MessagesRequest
from kiln.engine.server.anthropic.translation import chat_prompt, chat_request

USER = {"role": "user", "content": "hi"}
CACHE = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}


def text(said, **more):
    return {"type": "text", "text": said, **more}


def chat_of(*messages, **fields):
    body = {"messages": [*messages], **fields}
    return chat_prompt(CountTokensRequest.model_validate_json(json.dumps(body)))


def messages_of(*messages, **fields):
    return chat_of(*messages, **fields)["messages"]


@pytest.mark.parametrize("system", ["Be brief.", [text("Be brief.", **CACHE)]])
def test_the_system_prompt_is_the_first_message(system):
    first, second = messages_of(USER, system=system)
    assert first == {"role": "system", "content": [text("Be brief.")]}
    assert second == {"role": "user", "content": [text("hi")]}


def test_turns_of_a_user_are_one_message():
    made = messages_of(USER, {"role": "user", "content": [text("a", **CACHE), text("b")]})
    assert made == [{"role": "user", "content": [text("hi"), text("a"), text("b")]}]


def test_a_call_of_a_tool_and_its_result_keep_their_id_and_order():
    made = messages_of(
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                text("Let me look."),
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "Zürich"}},
                {"type": "tool_use", "id": "t2", "name": "look", "input": {}, **CACHE},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain", "is_error": False},
                {"type": "tool_result", "tool_use_id": "t2", "content": [text("sun")], **CACHE},
                {"type": "tool_result", "tool_use_id": "t3"},
                text("And now?"),
            ],
        },
    )
    assert [one["role"] for one in made] == ["user", "assistant", "tool", "tool", "tool", "user"]
    said = made[1]
    assert (said["reasoning_content"], said["content"]) == ("hm", "Let me look.")
    assert [call["id"] for call in said["tool_calls"]] == ["t1", "t2"]
    assert said["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "Zürich"}'}
    assert [one["tool_call_id"] for one in made[2:5]] == ["t1", "t2", "t3"]
    assert [one["content"] for one in made[2:5]] == [[text("rain")], [text("sun")], [text("")]]


def test_a_last_message_of_the_assistant_is_continued():
    chat = chat_of(USER, {"role": "assistant", "content": "The answer is"})
    assert chat["messages"][-1] == {"role": "assistant", "content": "The answer is"}
    assert (chat["add_generation_prompt"], chat["continue_final_message"]) == (False, True)


def test_tools_and_their_choice():
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, **CACHE}
    chat = chat_of(USER, tools=[tool, {**tool, "type": "custom"}], tool_choice={"type": "none"})
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}] * 2
    assert chat["tool_choice"] == "none"


@pytest.mark.parametrize(
    ("choice", "meaning"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_calls_can_be_demanded(choice, meaning):
    tool = {"name": "f", "input_schema": {"type": "object"}, "strict": True}
    choice = {**choice, "disable_parallel_tool_use": True}
    chat = chat_of(USER, tools=[tool], tool_choice=choice)
    assert chat["tool_choice"] == meaning
    assert chat["parallel_tool_calls"] is False
    assert chat["tools"][0]["function"]["strict"] is True


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        (None, None),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, None),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking, variables):
    assert chat_of(USER, thinking=thinking).get("chat_template_kwargs") == variables


def test_sampling_and_labels():
    body = MessagesRequest(
        **{"model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3},
        **{"stop_sequences": ["x"], "stream": True, "service_tier": "auto"},
        **{"metadata": {"user_id": "me"}, "messages": [USER]},
    )
    chat = chat_request(body)
    del chat["messages"]
    assert chat == {
        **{"model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3},
        **{"stop": ["x"], "stream": True, "user": "me"},
    }
