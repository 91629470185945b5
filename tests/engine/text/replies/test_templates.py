"""A template shows its format, and what it writes into a history is read as the same calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reply_texts import NOW, SEARCH, TOOLS, WEATHER

from kiln.engine.text.chat_template import ChatTemplate
from kiln.engine.text.replies.choice import choose_formats, tool_formats

FOLDER = Path(__file__).parent / "templates"
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.jinja")}
ENDS = ("<|im_end|>\n", "<|eot_id|>", "<|eot|>", "</s>", "<｜end▁of▁sentence｜>")
USER = {"role": "user", "content": "What is the weather?"}
BY_NAME = pytest.mark.parametrize("name", sorted(SOURCES))


def test_there_is_a_template_of_each_format():
    assert set(SOURCES) == {form.names[0] for form in tool_formats()}


@BY_NAME
def test_a_template_shows_its_format_and_no_other(name):
    assert [form.names[0] for form in tool_formats() if form.is_shown_by(SOURCES[name])] == [name]
    assert choose_formats([SOURCES[name]]).tools.names[0] == name


def assistant(content, calls, reasoning=None):
    """An assistant message as it stands in a history."""
    message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return message


def turn(name, template, history, message):
    """What the template writes for a message after the prompt for it, without its end."""
    before = template.render(history, add_generation_prompt=True, tools=TOOLS)
    after = template.render([*history, message], add_generation_prompt=False, tools=TOOLS)
    assert after.startswith(before), "the prompt is where the answer begins"
    text = after[len(before) :]
    for end in ENDS:
        text = text.removesuffix(end)
    reader = choose_formats([SOURCES[name]]).reader(TOOLS, prompt=before)
    return reader.push(text, last=True)


@BY_NAME
def test_calls_results_and_the_next_turn_go_round(name):
    template = ChatTemplate(SOURCES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    wanted = [SEARCH] if name == "llama3_json" else [WEATHER, NOW, SEARCH]
    ids = [f"abcdefgh{index}" for index in range(len(wanted))]
    history = [USER]
    for _ in range(2):
        message = assistant("", [(one, *call) for one, call in zip(ids, wanted, strict=True)])
        reply = turn(name, template, history, message)
        found = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
        assert found == wanted
        assert (reply.content, reply.reasoning) == ("", "")
        # What was read goes into the history, as a client sends it back.
        again = [(call.call_id, call.name, json.loads(call.arguments)) for call in reply.tool_calls]
        results = [
            {"role": "tool", "tool_call_id": call_id, "content": "fine"} for call_id, _, _ in again
        ]
        history += [assistant("", again), *results]
        text = turn(name, template, history, assistant("It is fine.", []))
        assert (text.content.strip(), text.tool_calls) == ("It is fine.", ())
        history += [assistant("It is fine.", []), USER]


@pytest.mark.parametrize("name", ["hermes", "glm45", "openai"])
def test_reasoning_goes_round_too(name):
    template = ChatTemplate(SOURCES[name], {})
    message = assistant("I look.", [("abcdefgh1", *WEATHER)], "First,\n\nthe weather.")
    reply = turn(name, template, [USER], message)
    assert (reply.reasoning, reply.content) == ("First,\n\nthe weather.", "I look.")
    assert [call.name for call in reply.tool_calls] == ["get_weather"]
