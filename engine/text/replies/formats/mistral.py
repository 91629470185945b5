"""Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`` or ``[TOOL_CALLS]name[ARGS]{…}``.

The second form repeats the mark for each call. ``[CALL_ID]`` and an id may follow the name, and
``[ARGS]`` may be missing.
"""

from __future__ import annotations

import re
import secrets
import string

from kiln.engine.grammar.grammar import literal
from kiln.engine.text.replies.calls import (
    Calls,
    Function,
    Offer,
    either,
    json_calls,
    marked,
    repeated,
)
from kiln.engine.text.replies.format import ToolFormat, Tools
from kiln.engine.text.replies.json_calls import JsonCall, read_arguments
from kiln.engine.text.replies.lark import Lark
from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.source import Steps, TextSource

_MARK, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.:-]*")
_LETTERS = string.ascii_letters + string.digits


def _new_id() -> str:
    """Return nine letters or digits: the templates refuse other ids."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def _parse(source: TextSource, out: MessageBuilder, tools: Tools) -> Steps[None]:
    while (yield from source.find(_MARK, out.content)):
        first = yield from source.peek()
        if first == "[":
            source.read(1)
            yield from _read_list(source, out)
        elif first == "{":
            yield from JsonCall(source, out).read()
        else:
            yield from _read_named(source, out)


def _read_list(source: TextSource, out: MessageBuilder) -> Steps[None]:
    """Read calls up to the closing bracket. The source must be recording."""
    yield from source.read_space()
    while (yield from JsonCall(source, out).read()):
        source.record()
        yield from source.read_space()
        between = yield from source.read_mark(",", "]")
        if between == "]":
            source.recorded()
            return
        yield from source.read_space()


def _read_named(source: TextSource, out: MessageBuilder) -> Steps[None]:
    """Read a name and an object. The source must be recording."""
    name, call_id = (yield from source.text_while(_NAME)), ""
    yield from source.read_space()
    if (yield from source.read_mark(_ID)):
        call_id = yield from source.text_while(_NAME)
    yield from source.read_mark(_ARGUMENTS)
    yield from source.read_space()
    if not name or (yield from source.peek()) != "{":
        out.content(source.recorded())
        return
    source.recorded()
    out.call(name, call_id if len(call_id) == 9 and call_id.isalnum() else None)
    yield from read_arguments(source, out)


def _write(lark: Lark, offer: Offer) -> Calls:
    """Write both forms: the model's own version knows one of them."""
    listed = f'"[" {repeated(json_calls(lark, offer), literal(", "), offer.parallel)} "]"'
    named = lark.rule(either(*(_named(lark, one) for one in offer.functions)))
    rest = either(listed, repeated(named, lark.mark(_MARK), offer.parallel))
    return marked(lark, _MARK, rest, offer.parallel)


def _named(lark: Lark, function: Function) -> str:
    name, arguments = literal(function.name), lark.schema(function.json_schema)
    call_id = f"({lark.mark(_ID)} /[a-zA-Z0-9]{{9}}/)?"
    return f"{name} {call_id} {lark.mark(_ARGUMENTS)} {arguments}"


FORMAT = ToolFormat(
    names=("mistral",),
    parse=_parse,
    write=_write,
    shown_by=((_MARK,),),
    marks=(_MARK, _ID, _ARGUMENTS),
    new_id=_new_id,
)
