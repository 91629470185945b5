"""GLM 4.5 to 4.7: ``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``.

Strings are raw text, other values JSON; the tool's schema tells which.
"""

from __future__ import annotations

import re

from kiln.engine.grammar.grammar import literal
from kiln.engine.text.replies.calls import Calls, Function, Offer, either, marked, repeated
from kiln.engine.text.replies.format import ToolFormat, Tools
from kiln.engine.text.replies.lark import Lark
from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.raw_values import RawValues
from kiln.engine.text.replies.source import Steps, TextSource
from kiln.engine.text.replies.tagged_arguments import TaggedArguments

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^<\s]+")


def _parse(source: TextSource, out: MessageBuilder, tools: Tools) -> Steps[None]:
    while (yield from source.find(_BEGIN, out.content)):
        name = (yield from source.text_until(_KEY, _END, "\n", "<")).strip()
        yield from source.read_space()
        if not name or not (yield from source.next_of(_KEY, _END)):
            out.content(source.recorded())
            continue
        source.recorded()
        out.call(name)
        yield from _read_arguments(source, out, TaggedArguments(source, out, tools.schema(name)))


def _read_arguments(
    source: TextSource, out: MessageBuilder, arguments: TaggedArguments
) -> Steps[None]:
    """Read keys and values up to the end of the call. What is neither is content."""
    source.record()
    while key := (yield from _read_key(source)):
        source.recorded()
        yield from arguments.read_value(key, {_VALUE_END: (_KEY, _END)}, trim=False)
        source.record()
    out.content(source.recorded())
    if (yield from source.read_mark(_END)):
        arguments.close()


def _read_key(source: TextSource) -> Steps[str]:
    """Read a key and the tag of its value; "" if something else comes next."""
    if not (yield from source.read_mark(_KEY)):
        return ""
    key = (yield from source.text_until(_KEY_END, "<")).strip()
    yield from source.read_mark(_KEY_END)
    yield from source.read_space()
    return key if (yield from source.read_mark(_VALUE)) else ""


def _write(lark: Lark, offer: Offer) -> Calls:
    values = RawValues(lark, (_VALUE_END, "\n"), (_VALUE_END,))

    def call(function: Function) -> str:
        def tag(name: str) -> str:
            if not _NAME.fullmatch(name):
                raise function.refused(f"has the parameter {name[:80]!r}")
            return lark.sequence(_KEY, name, _KEY_END, "\n", _VALUE)

        key_end = lark.sequence(_KEY_END, "\n", _VALUE)
        any_tag = f"{lark.mark(_KEY)} /{_NAME.pattern}/ {key_end}"
        name = literal(f"{function.name}\n")
        return f"{name} {values.arguments(function, tag, any_tag)}"

    one = f"{lark.rule(either(*map(call, offer.functions)))} {lark.mark(_END)}"
    rest = repeated(one, lark.sequence("\n", _BEGIN), offer.parallel)
    return marked(lark, _BEGIN, rest, offer.parallel)


FORMAT = ToolFormat(
    names=("glm45", "glm47"),
    parse=_parse,
    write=_write,
    shown_by=((_KEY,),),
    marks=(_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END),
)
