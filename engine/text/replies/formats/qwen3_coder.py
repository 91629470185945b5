"""Qwen3-Coder: ``<tool_call><function=f><parameter=k>value</parameter></function></tool_call>``.

Values are raw text with a line break before and after; the tool's schema has their types. Models
sometimes leave out ``<tool_call>``.
"""

from __future__ import annotations

import re

from kiln.engine.text.replies.calls import Calls, Function, Offer, either, marked, repeated
from kiln.engine.text.replies.format import ToolFormat, Tools
from kiln.engine.text.replies.lark import Lark
from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.raw_values import RawValues
from kiln.engine.text.replies.source import Steps, TextSource
from kiln.engine.text.replies.tagged_arguments import TaggedArguments

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_KEY = re.compile(r"[^<>\s]+")
_VALUE_ENDS = {
    _PARAMETER_END: (_PARAMETER, _FUNCTION_END, _END),
    _FUNCTION_END: (_END,),  # models sometimes leave out the tag of the last parameter
}


def _parse(source: TextSource, out: MessageBuilder, tools: Tools) -> Steps[None]:
    while (yield from source.find(_BEGIN, out.content, _FUNCTION)):
        name = yield from _read_name(source, _FUNCTION)
        yield from source.read_space()
        if not name or not (yield from source.next_of(_PARAMETER, _FUNCTION_END, _END)):
            out.content(source.recorded())
            continue
        source.recorded()
        out.call(name)
        yield from _read_arguments(source, out, TaggedArguments(source, out, tools.schema(name)))
        yield from source.read_end(_END, out.content)


def _read_arguments(
    source: TextSource, out: MessageBuilder, arguments: TaggedArguments
) -> Steps[None]:
    """Read the parameters up to the end of the function. What is no parameter is content."""
    source.record()
    while key := (yield from _read_name(source, _PARAMETER)):
        source.recorded()
        if (yield from arguments.read_value(key, _VALUE_ENDS, trim=True)) == _FUNCTION_END:
            arguments.close()
            return
        source.record()
    out.content(source.recorded())
    if (yield from source.next_of(_FUNCTION_END, _END)):
        yield from source.read_mark(_FUNCTION_END)
        arguments.close()


def _read_name(source: TextSource, tag: str) -> Steps[str]:
    """Read ``tag`` with a name and ``>``; "" if something else comes next."""
    if not (yield from source.read_mark(tag)):
        return ""
    name = (yield from source.text_until(">", "\n", "<")).strip()
    return name if (yield from source.read_mark(">")) else ""


def _write(lark: Lark, offer: Offer) -> Calls:
    values = RawValues(lark, ("\n", _PARAMETER_END, "\n"), (_PARAMETER_END, _FUNCTION_END))

    def call(function: Function) -> str:
        def tag(name: str) -> str:
            if not _KEY.fullmatch(name):
                raise function.refused(f"has the parameter {name[:80]!r}")
            return lark.sequence(_PARAMETER, f"{name}>\n")

        any_tag = f'{lark.mark(_PARAMETER)} /{_KEY.pattern}/ ">\\n"'
        arguments = values.arguments(function, tag, any_tag)
        head = lark.sequence(_FUNCTION, f"{function.name}>\n")
        return f"{head} {arguments}"

    calls = lark.rule(either(*map(call, offer.functions)))
    end = lark.sequence(_FUNCTION_END, "\n", _END)
    one = f'"\\n" {calls} {end}'
    rest = repeated(one, lark.sequence("\n", _BEGIN), offer.parallel)
    return marked(lark, _BEGIN, rest, offer.parallel, _FUNCTION)


FORMAT = ToolFormat(
    names=("qwen3_coder", "qwen3_xml"),
    parse=_parse,
    write=_write,
    shown_by=((_FUNCTION,),),
    marks=(_BEGIN, _END, _FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END),
)
