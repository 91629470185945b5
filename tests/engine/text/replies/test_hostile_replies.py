"""No reply is too long, too deep or too strange to be read."""

from __future__ import annotations

import json
import warnings

import pytest
from depth import at_depth
from reply_texts import FORMATS, TOOLS

from kiln.engine.text.replies.choice import choose_formats
from kiln.engine.text.replies.source import TextSource

BIG = at_depth(2**12, 2**18)
LONG = {
    "a string": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x", '"}}</tool_call>'),
    "a list": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', ",1", "]}}</tool_call>"),
    "a held list": ("hermes", '<tool_call>{"arguments": {"a": [1', ",1", ']}, "name": "f"}'),
    "a number": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "1", "}}"),
    "text": ("hermes", "", "x", ""),
    "white space": ("hermes", "", " \n", ""),
    "white space in a call": ("hermes", "<tool_call>", " ", "x"),
    "marks": ("hermes", "", "<tool_call>", ""),
    "parts of marks": ("hermes", "", "<tool_", ""),
    "objects": ("llama3_json", "", '{"name":', ""),
    "a raw string": ("qwen3_coder", "<function=write_file><parameter=text>", "\n<", "</parameter>"),
    "a raw object": ("qwen3_coder", "<function=search><parameter=filters>", "{", "</parameter>"),
    "tags in a value": ("qwen3_coder", "<function=f><parameter=a>", "</parameter> ", ""),
    "values": ("glm45", "<tool_call>f", "<arg_key>a</arg_key><arg_value>1</arg_value>", ""),
    "a header": ("openai", "<|channel|>", "a ", "<|message|>"),
    "messages": ("openai", "", "<|channel|>analysis<|message|>a<|end|>", ""),
    "names": ("deepseek_v31", "<｜tool▁call▁begin｜>", "f", ""),
    "calls": ("mistral", "", "[TOOL_CALLS]f{}", ""),
    "a literal": ("pythonic", "[f(a='", "x", "')]"),
    "brackets": ("pythonic", "[f(a=", "[", ""),
    "a list of literals": ("pythonic", "[f(a=[", "1,", "])]"),
}


@pytest.mark.parametrize("case", LONG)
def test_the_work_for_a_reply_grows_with_its_length(case):
    """Read a reply character by character, and another of eight times its length."""
    parser, before, part, after = LONG[case]

    def read(length):
        text = before + part * (length // len(part)) + after
        reader = choose_formats([], parser).reader(TOOLS)
        unread = 0
        for char in text:
            reader.push(char)
            unread = max(unread, len(reader._source._text))
        reader.finish()
        return unread

    short, long = read(BIG // 8), read(BIG)
    assert long <= max(short, 64), "unread text must not grow: it is copied with each piece"


NESTED = {
    "minus": "-" * 20_000 + "1",
    "attributes": "x" + ".x" * 20_000,
    "sums": "1" + "+1" * 20_000,
    "not": "not " * 20_000 + "1",
    "conditions": "1 if 1 else " * 20_000 + "1",
    "lambdas": "lambda:" * 20_000 + "1",
    "calls": "x" + "()" * 20_000,
    "digits": "9" * 20_000,
    "strings": "'a'" * 20_000,
    "a formatted string": "f'{1}'",
    "a comprehension": "[a for a in b]",
    "a generator of power": "9**9**9",
    "a walrus": "(b := 1)",
}


@pytest.mark.parametrize("name", NESTED)
def test_hostile_literals_are_never_evaluated_and_never_an_error(name):
    text = f"[f(a={NESTED[name]})]"
    reader = choose_formats([], "pythonic").reader(TOOLS)
    assert reader.push(text, last=True).content == ("" if name == "strings" else text)
    raw = f"<function=search><parameter=filters>{NESTED[name]}</parameter></function>"
    reader = choose_formats([], "qwen3_coder").reader(TOOLS)
    assert len(reader.push(raw, last=True).tool_calls) == 1


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.parser)
def test_nesting_costs_no_stack(form):
    for text in ("[" * 5000, '{"a":' * 5000, "<tool_call>" * 2000):
        call = form.write([("search", {"filters": "CUT"})]).replace('"CUT"', "CUT")
        for whole in (call.partition("CUT")[0] + text, text, call.replace("CUT", text)):
            reader = choose_formats([], form.parser).reader(TOOLS)
            reader.push(whole, last=True)


def test_a_source_that_has_ended_never_waits():
    source = TextSource()
    source.add("abc")
    source.end()
    pieces = []
    with pytest.raises(StopIteration) as ended:
        next(source.read_until(("<x>",), pieces.append))
    assert (ended.value.value, pieces) == ("", ["abc"])


@pytest.mark.parametrize("text", [r"\d+\.", r"C:\Users\new", r"\\d", "\\"])
def test_backslashes_in_literals_are_read_as_python_reads_them_without_a_warning(text, recwarn):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = eval(f"'{text}'")
        except SyntaxError:
            wanted = None
    for prefix in ("", "r") if wanted is not None else ("",):
        reader = choose_formats([], "pythonic").reader(TOOLS)
        reply = reader.push(f"[f(a={prefix}'{text}')]", last=True)
        found = [json.loads(call.arguments)["a"] for call in reply.tool_calls]
        assert found == ([] if wanted is None else [text if prefix else wanted])
    assert not recwarn.list
