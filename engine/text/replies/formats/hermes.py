"""Hermes, Qwen 2.5 and Qwen 3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from kiln.engine.text.replies.calls import Calls, Offer, json_calls, marked, repeated
from kiln.engine.text.replies.format import ToolFormat, Tools
from kiln.engine.text.replies.json_calls import JsonCall
from kiln.engine.text.replies.lark import Lark
from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.source import Steps, TextSource

_BEGIN, _END = "<tool_call>", "</tool_call>"


def _parse(source: TextSource, out: MessageBuilder, tools: Tools) -> Steps[None]:
    while (yield from source.find(_BEGIN, out.content)):
        if (yield from JsonCall(source, out).read()):
            yield from source.read_end(_END, out.content)


def _write(lark: Lark, offer: Offer) -> Calls:
    end = lark.sequence("\n", _END)
    call = f'"\\n" {json_calls(lark, offer)} {end}'
    rest = repeated(call, lark.sequence("\n", _BEGIN), offer.parallel)
    return marked(lark, _BEGIN, rest, offer.parallel)


FORMAT = ToolFormat(
    names=("hermes",),
    parse=_parse,
    write=_write,
    shown_by=((_BEGIN,),),
    unless=("<function=", "<arg_key>"),
    marks=(_BEGIN, _END),
)
