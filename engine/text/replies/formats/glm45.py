"""GLM 4.5 to 4.7: ``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``.

Strings are raw text, other values JSON; the tool's schema tells which.
"""

from __future__ import annotations

from kiln.engine.text.replies.format import ToolFormat, Tools
from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.source import Steps, TextSource
from kiln.engine.text.replies.tagged_arguments import TaggedArguments

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


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


FORMAT = ToolFormat(
    names=("glm45", "glm47"),
    parse=_parse,
    shown_by=((_KEY,),),
    marks=(_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END),
)
