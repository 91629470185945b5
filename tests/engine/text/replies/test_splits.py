"""However a reply is split, its deltas add up to the same message."""

from __future__ import annotations

import json
import random

import pytest
from depth import at_depth
from reply_texts import FORMATS, TOOLS, WEATHER

from kiln.engine.text.replies.choice import choose_formats, tool_formats

BY_NAME = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.parser)


def read(form, pieces, **options):
    """Push pieces and return the message that the deltas add up to."""
    reader = choose_formats([], form.parser).reader(TOOLS, **options)
    deltas = [reader.push(piece) for piece in pieces] + [reader.finish()]
    calls = []
    for part in (part for delta in deltas for part in delta.tool_calls):
        if part.name is not None:
            assert part.index == len(calls), "calls begin in their order"
            assert part.call_id
            calls.append([part.name, ""])
        else:
            assert part.index == len(calls) - 1, "only the latest call grows"
            assert part.arguments
            assert part.call_id is None
        calls[part.index][1] += part.arguments
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    assert reader.has_calls == bool(calls)
    return content, reasoning, calls


def test_every_format_has_a_corpus_of_forty_texts():
    names = {name for form in tool_formats() for name in form.names[:1]}
    assert {form.parser for form in FORMATS} == names
    for form in FORMATS:
        assert len(set(form.texts())) >= 40


@BY_NAME
def test_text_and_calls_are_told_apart(form):
    for text, content, calls in form.good():
        found, reasoning, read_calls = read(form, [text])
        assert (found, reasoning) == (content, "")
        assert [(name, json.loads(arguments)) for name, arguments in read_calls] == calls, text


@BY_NAME
def test_a_reply_can_be_split_into_single_characters(form):
    for text in form.texts():
        assert read(form, list(text)) == read(form, [text]), text


@BY_NAME
def test_a_reply_can_be_split_anywhere(form):
    chance = random.Random(form.parser)
    for text in form.texts():
        whole = read(form, [text])
        places = range(1, len(text))
        for place in at_depth(chance.sample(places, min(len(places), 3)), places):
            assert read(form, [text[:place], text[place:]]) == whole, (text, place)
        for _ in range(at_depth(1, 20)):
            cuts = sorted(chance.sample(places, min(len(places), chance.randrange(1, 9))))
            ends = zip([0, *cuts], [*cuts, len(text)], strict=True)
            assert read(form, [text[start:end] for start, end in ends]) == whole, text


@BY_NAME
def test_without_tools_all_of_a_reply_is_content(form):
    if form.parser == "openai":
        pytest.skip("harmony is read always")
    for text in form.texts():
        reader = choose_formats([], form.parser).reader()
        assert reader.push(text, last=True).content == text
        assert not reader.has_calls


@BY_NAME
def test_no_text_is_lost_where_there_is_no_call(form):
    for text in form.texts():
        content, reasoning, calls = read(form, [text])
        if not calls and form.parser != "openai":
            assert (content, reasoning) == (text, "")


@BY_NAME
def test_only_the_first_call_is_kept_without_parallel_calls(form):
    text = form.write([WEATHER, WEATHER, WEATHER])
    content, _, calls = read(form, list(text), parallel=False)
    assert (content, len(calls)) == ("", 1)
    assert json.loads(calls[0][1]) == WEATHER[1]


@BY_NAME
def test_arguments_arrive_while_they_are_written(form):
    if form.parser == "pythonic":
        pytest.skip("its calls count when they are complete")
    text = form.write([("write_file", {"path": "x", "text": "y" * 200})])
    reader = choose_formats([], form.parser).reader(TOOLS)
    cut = text.index("y" * 100) + 100
    early = reader.push(text[:cut])
    assert early.tool_calls[0].name == "write_file"
    assert early.tool_calls[0].arguments.endswith("y" * 100)


HEADERS = {  # what models write into headers of harmony: the reasoning, the content and the calls
    "<|channel|>analysis<|message|>a<|end|>": ("a", "", []),
    "<|channel|>commentary<|message|>a<|end|>": ("", "a", []),
    "<|channel|>final<|message|>a": ("", "a", []),
    "<|channel|>––commentary?<|message|>a": ("", "a", []),
    "<|channel|>analysis to=functions.f code<|message|>{}<|call|>": ("", "", ["f"]),
    "<|channel|>commentary?commentary? to=functions.f<|message|>{}": ("", "", ["f"]),
    "<|channel|>commentary to=assistant<|channel|>analysis<|message|>a": ("a", "", []),
    "<|channel|>commentary to=functions.a-b.c <|constrain|>json<|message|>{}": ("", "", ["a-b.c"]),
    "<|channel|>commentary to=get_weather<|message|>{}": ("", "", ["get_weather"]),
    "<|channel|>commentary to=python code<|message|>a": ("a", "", []),
    " to=functions.f<|channel|>commentary json<|message|>{}": ("", "", ["f"]),
    "<|channel|>anal": ("", "", []),
    "<|channel|>analysis": ("", "", []),
    "<|channel|>I think that": ("", "I think that", []),
}


@pytest.mark.parametrize("text", HEADERS)
def test_a_header_of_harmony_says_what_its_message_is(text):
    form = next(form for form in FORMATS if form.parser == "openai")
    content, reasoning, calls = read(form, list(text))
    assert (reasoning, content, [name for name, _ in calls]) == HEADERS[text]
    assert all(arguments == "{}" for _, arguments in calls)
