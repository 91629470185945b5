"""Llama 3.1 to 3.3 and some of Llama 4: ``{"name": …, "parameters": {…}}``, several after ``;``.

No mark ends a call, and ``<|python_tag|>`` before it is optional. Models also write text before a
call, so that any object can be one, if it has no other keys than those of calls.
"""

from __future__ import annotations

from kiln.engine.text.replies.format import ToolFormat, Tools
from kiln.engine.text.replies.json_calls import JsonCall
from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.source import Steps, TextSource

_MARK = "<|python_tag|>"


def _parse(source: TextSource, out: MessageBuilder, tools: Tools) -> Steps[None]:
    while (yield from source.find(_MARK, out.content, "{")):
        if not (yield from JsonCall(source, out, bare=True).read()):
            continue
        source.record()
        yield from source.read_space()
        if (yield from source.read_mark(";")):
            yield from source.read_space()
            if (yield from source.next_of(_MARK, "{")):
                source.recorded()
        out.content(source.recorded())


FORMAT = ToolFormat(
    names=("llama3_json", "llama4_json"),
    parse=_parse,
    shown_by=(("<|start_header_id|>", "<|header_start|>"), ('"parameters": ',)),
    marks=(_MARK,),
)
