"""Reasoning is separated from the content, wherever the prompt or the reply begins it."""

from __future__ import annotations

import pytest
from reply_texts import TOOLS

from kiln.engine.text.replies.choice import choose_formats, reasoning_parsers

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
CASES = {  # parser, end of the prompt, text: reasoning, content
    "the reply begins it": ("qwen3", "", "<think>\na\n</think>\n\nb", "a", "b"),
    "after white space": ("qwen3", "", "\n<think>a</think>b", "a", "b"),
    "the prompt begins it": ("qwen3", "<think>\n", "a</think>b", "a", "b"),
    "the prompt and the reply": ("qwen3", "<think>\n", "<think>\na</think>b", "a", "b"),
    "the prompt ends it": ("qwen3", "<think>\n\n</think>\n\n", "a b", "", "a b"),
    "there is none": ("qwen3", "", "  a <think> b", "", "  a <think> b"),
    "only white space": ("qwen3", "", " \n", "", " \n"),
    "it never ends": ("qwen3", "<think>", "a </thin", "a </thin", ""),
    "it is empty": ("qwen3", "", "<think>\n\n</think>\n\nb", "", "b"),
    "a second one is content": ("qwen3", "", "<think>a</think>b <think>", "a", "b <think>"),
    "always": ("deepseek_r1", "", "a\n</think>\nb", "a", "b"),
    "always, but the prompt ended it": ("deepseek_r1", "</think>\n\n", "a", "", "a"),
    "Mistral's marks": ("mistral", "", "[THINK]a[/THINK]b", "a", "b"),
    "a call inside is reasoning": ("qwen3", "<think>", f"{CALL}</think>b", CALL, "b"),
}


@pytest.mark.parametrize("case", CASES)
def test_reasoning_is_told_from_content(case):
    parser, prompt, text, reasoning, content = CASES[case]
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        reader = choose_formats([], "hermes", parser).reader(TOOLS, prompt=prompt)
        deltas = [reader.push(piece) for piece in pieces] + [reader.finish()]
        assert "".join(delta.reasoning for delta in deltas) == reasoning
        assert "".join(delta.content for delta in deltas) == content
        assert not reader.has_calls


@pytest.mark.parametrize("parser", [name for name in reasoning_parsers() if name != "none"])
def test_a_call_may_follow_the_reasoning_in_the_same_piece(parser):
    if parser == "openai_gptoss":
        pytest.skip("its calls have a form of their own")
    form = reasoning_parsers()[parser]
    reader = choose_formats([], "hermes", parser).reader(TOOLS)
    delta = reader.push(f"{form.begin}I call.{form.end}\n{CALL}")
    assert (delta.reasoning, delta.content) == ("I call.", "")
    assert [call.name for call in delta.tool_calls] == ["f"]


def test_reasoning_arrives_as_it_is_written():
    reader = choose_formats([], None, "qwen3").reader(prompt="<think>")
    assert [reader.push(piece).reasoning for piece in ("a", " b", " ", "c<")] == [
        "a",
        " b",
        "",
        " c",
    ]
