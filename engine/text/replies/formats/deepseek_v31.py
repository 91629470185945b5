"""DeepSeek V3.1: ``name<｜tool▁sep｜>{…}`` between the marks of a call."""

from __future__ import annotations

from kiln.engine.text.replies.deepseek import MARKS, NAME, SEPARATOR, read_calls, write_calls
from kiln.engine.text.replies.format import ToolFormat
from kiln.engine.text.replies.source import Steps, TextSource


def _read_name(source: TextSource) -> Steps[str]:
    name = yield from source.text_until(SEPARATOR, "\n")
    return name if (yield from source.read_mark(SEPARATOR)) else ""


FORMAT = ToolFormat(
    names=("deepseek_v31",),
    parse=lambda source, out, tools: read_calls(source, out, _read_name),
    write=lambda lark, offer: write_calls(lark, offer, NAME + SEPARATOR, ""),
    shown_by=((SEPARATOR,),),
    unless=("```json",),
    marks=MARKS,
)
