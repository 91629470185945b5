"""Replies as models write them, in every format of tool calls: a corpus for each of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": properties},
        },
    }
    for name, properties in {
        "get_weather": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
        },
        "write_file": {"path": {"type": "string"}, "text": {"type": "string"}},
        "search": {
            "query": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "filters": {"type": "object"},
            "limits": {"type": "array", "items": {"type": "number"}},
        },
        "now": {},
    }.items()
]
Call = tuple[str, dict[str, object]]
WEATHER: Call = ("get_weather", {"city": "Zürich", "days": 3, "metric": True})
NOW: Call = ("now", {})
FILE: Call = ("write_file", {"path": "a.py", "text": 'def f():\n    return {"a": [1]}\n\n\n'})
SEARCH: Call = ("search", {"query": "x", "filters": {"a": {"b": [1, 2.5, None]}}, "limits": [1, 2]})
QUOTES: Call = ("write_file", {"path": "C:\\a\\b", "text": "say \"}}{{][\" and 'hi' \\n"})
TAGS: Call = ("write_file", {"path": "x", "text": "<b>a</b> & <tool> 日本 😀 </parameter> x"})
EMPTY: Call = ("write_file", {"path": "", "text": ""})
UNKNOWN: Call = ("no_such_tool", {"a": "1"})
LONG: Call = ("write_file", {"path": "x", "text": "line of text\n" * 12})
CALLS = [WEATHER, NOW, FILE, SEARCH, QUOTES, TAGS, EMPTY, UNKNOWN, LONG]


@dataclass(frozen=True)
class Format:
    """How to write calls in one format. ``parser`` is its name; ``odd`` are texts of its own.

    ``texts`` says whether text can stand before, between and after calls.
    """

    parser: str
    write: Callable[[list[Call]], str]
    odd: list[str] = field(default_factory=list)
    before: bool = True
    after: bool = True

    def good(self) -> list[tuple[str, str, list[Call]]]:
        """Return texts with the content and the calls that they consist of."""
        found: list[tuple[str, str, list[Call]]] = [("", "", []), ("Hello.\n\n", "Hello.\n\n", [])]
        found += [(self.write([call]), "", [call]) for call in CALLS]
        found += [(self.write(calls), "", calls) for calls in (CALLS[:2], CALLS[2:4], CALLS)]
        if self.before:
            found.append(("Let me see.\n\n" + self.write([WEATHER]), "Let me see.", [WEATHER]))
            found.append((" \n" + self.write([NOW]), "", [NOW]))
        if self.before and self.after:
            both = "One.\n" + self.write([NOW]) + "\nTwo."
            found.append((both, "One.\n\nTwo.", [NOW]))
        return found

    def bad(self) -> list[str]:
        """Return broken and unusual texts: cut off, with a piece missing, or with one too many."""
        whole = self.write([WEATHER, FILE])
        cuts = range(1, len(whole), max(1, len(whole) // 14))
        texts = [whole[:cut] for cut in cuts]
        texts += [whole[:cut] + whole[cut + 3 :] for cut in cuts]
        return [*texts, whole + "}", whole + whole, whole[::-1], *self.odd, *COMMON]

    def texts(self) -> list[str]:
        """Return the whole corpus."""
        return [text for text, _, _ in self.good()] + self.bad()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: list[Call]) -> str:
    parts = (_json({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{part}\n</tool_call>" for part in parts)


def _llama(calls: list[Call]) -> str:
    parts = (_json({"name": name, "parameters": arguments}) for name, arguments in calls)
    return "; ".join(parts)


def _pythonic(calls: list[Call]) -> str:
    def written(name: str, arguments: dict[str, object]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return f"[{', '.join(written(*call) for call in calls)}]"


def _mistral_list(calls: list[Call]) -> str:
    parts = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS] {_json(parts)}"


def _mistral_named(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _raw(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen3_coder(calls: list[Call]) -> str:
    def written(name: str, arguments: dict[str, object]) -> str:
        values = "".join(
            f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(written(*call) for call in calls)


def _glm(calls: list[Call]) -> str:
    def written(name: str, arguments: dict[str, object]) -> str:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{values}</tool_call>"

    return "\n".join(written(*call) for call in calls)


def _deepseek_v3(calls: list[Call]) -> str:
    parts = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: list[Call]) -> str:
    parts = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "".join(parts) + "<｜tool▁calls▁end｜>"


def _harmony(calls: list[Call]) -> str:
    parts = (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"
        "<|call|>"
        for name, arguments in calls
    )
    return "<|start|>assistant".join(parts)


COMMON = [
    "a < b and c > d, [1, 2], {x}",
    "[TOOL",
    "<tool_call",
    "<tool_call></tool_call>",
    "{}",
    "[]",
    '{"name": "get_weather"}',
    "\n\n \n",
    "日本語 😀 \u2028 text",
    "```json\n{}\n```",
]
_TWICE = json.dumps(json.dumps({"city": "x"}))
_ODD_OBJECTS = [
    '{"name": "f", "arguments": {"a": "\\u00e9\\ud83d\\ude00 \\"x\\" \\\\"}}',
    '{"name": "f", "arguments": ' + _TWICE + "}",
    '{"arguments": {"name": "g"}, "name": "f"}',
    '{"name": "f", "arguments": null}',
    '{"name": "f", "arguments": ""}',
    '{"name": "f", "arguments": []}',
    '{"name": "f", "arguments": "no object"}',
    '{"name": "f", "name": "g", "arguments": {"a": 1, "a": 2}}',
    '{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}',
    '{"name": "", "arguments": {}}',
    '{"name": 3, "arguments": {}}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": 01}}',
    '{"name": "f", "arguments": {"a": "\\x"}}',
    '{"name": "f", "arguments": {"a": "line\nbreak\ttab"}}',
    '{"name": "f", "arguments": {"a": 1,}}',
    "{'name': 'f', 'arguments': {}}",
    '{"name" : "f" , "arguments" : { "a" : [ ] , "b" : { } } } ',
    '{"name": "f", "arguments": {"a": 1}',
    '{"name": "f", "arguments": {"a": 1}}}',
    '{"name": "f", "arguments": {"a": -1.5e-3, "b": tru}}',
    '{"name": "f", "arguments": ' + '{"a":' * 300 + "1" + "}" * 301,
    '{"name": "f", "arguments": {"a": ' + "[" * 150 + "]" * 150 + "}}",
    '{"name": "f", "arguments": {"a": 1}, "id": "x", "type": "function"}',
]
_HARMONY_ODD = [
    "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
    " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>",
    "<|channel|>commentary to=functions.f json<|message|>not json<|call|>",
    "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
    "<|channel|>commentary<|message|>First I look.<|end|>" + _harmony([WEATHER]),
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b",
    "<|channel|>final<|message|>no end<|channel|>final<|message|>two",
    "<|start|>assistant<|message|>text",
    "<|message|>text<|return|>",
    "<|channel|>final Hello world",
    "<|channel|>commentary?commentary? to=functions.f??<|message|>{}<|call|>",
    "<|channel|>commentary to=assistant<|channel|>analysis to=functions.f code<|message|>{}",
    "<|channel|>––commentary<|message|>text<|end|>more text<|start|>assistant",
    "<|channel|>analysis to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}",
    "<|channel|>" + "x" * 500 + "<|message|>y",
    "<|channel|>",
    "<|end|><|end|>text",
    "plain text",
]
FORMATS = [
    Format("hermes", _hermes, [f"<tool_call>{one}</tool_call> b" for one in _ODD_OBJECTS]),
    Format("llama3_json", _llama, [*_ODD_OBJECTS, f"<|python_tag|>{_llama([WEATHER])}"]),
    Format(
        "pythonic",
        _pythonic,
        [
            "[f(a=1)](http://x)",
            "[f(1)]",
            "[f(**{})]",
            "[f(a=g())]",
            "[f(a=x)]",
            "[f(a=-1, b=true, c=null, d=(1, 2), e=1e400)]",
            "[f(a='''x\"y''', b='a' 'b')]",
            "[f(a=b'x')]",
            "[f(a={1: 2})]",
            "[f(a=" + "[" * 100 + "]" * 100 + ")]",
            "[f(a=" + "-" * 500 + "1)]",
            "[f(a='\\ud800')]",
            "[f(a='x\ny')]",
            "[f(), g(a=]",
            "<|python_start|>[f(a=1)]<|python_end|> text",
            "text <|python_start|>no list<|python_end|>",
            "[module.f(a=1)]; [g()]",
        ],
        before=False,
        after=False,
    ),
    Format(
        "mistral",
        _mistral_list,
        [
            *(f"[TOOL_CALLS][{one}]" for one in _ODD_OBJECTS),
            _mistral_named([WEATHER, FILE]),
            "text[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}",
            '[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}',
            "[TOOL_CALLS]f[ARGS]no object",
            "[TOOL_CALLS] [] [TOOL_CALLS]",
            _mistral_list([NOW]) + _mistral_list([NOW]),
        ],
    ),
    Format(
        "qwen3_coder",
        _qwen3_coder,
        [
            "<function=f>\n</function>\n</tool_call>",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nx\n</function>\n</tool_call>",
            "<function=get_weather><parameter=days>many</parameter></function>",
            "<function=get_weather><parameter=days>3.0</parameter></function>",
            "<function=get_weather><parameter=metric>True</parameter></function>",
            "<function=search><parameter=filters>{'a': None}</parameter></function>",
            "<function=search><parameter=query>null</parameter></function>",
            "<function=search><parameter=limits>[1,</parameter></function>",
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "<function=f>text</function>",
            "<function=>\n</function>",
            "<function=f <parameter=a>",
            "<function=f>\n<parameter=a\n</parameter></function>",
            "say <function=f> in text",
        ],
    ),
    Format(
        "glm45",
        _glm,
        [
            "<tool_call>now</tool_call>",
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
            "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>",
            "<tool_call>f\n<arg_key>a\n<arg_value>1</arg_value></tool_call>",
            "<tool_call>get_weather<arg_key>days</arg_key><arg_value>x</arg_value></tool_call>",
            "<tool_call>search<arg_key>query</arg_key><arg_value></arg_value></tool_call>",
            "<tool_call>no name here at all</tool_call>",
            "<tool_call>\n\n</tool_call>",
        ],
    ),
    Format(
        "deepseek_v3",
        _deepseek_v3,
        [
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n```<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>other<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜> text",
        ],
    ),
    Format(
        "deepseek_v31",
        _deepseek_v31,
        [
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}\n<｜tool▁calls▁end｜> text",
            "<｜tool▁call▁begin｜>f\n<｜tool▁sep｜>{}",
            "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>f<｜tool▁sep｜>[]",
        ],
    ),
    Format("openai", _harmony, _HARMONY_ODD, before=False, after=False),
]
