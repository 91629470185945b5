"""DeepSeek V3 and R1: ``function<｜tool▁sep｜>name``, then the arguments in a fence of JSON."""

from __future__ import annotations

from kiln.engine.text.replies.deepseek import (
    CALL_END,
    MARKS,
    NAME,
    SEPARATOR,
    read_calls,
    write_calls,
)
from kiln.engine.text.replies.format import ToolFormat
from kiln.engine.text.replies.source import Steps, TextSource

_FENCE, _CLOSING = "```json", "```"
_BEFORE = f"function{SEPARATOR}{NAME}\n{_FENCE}\n"


def _read_name(source: TextSource) -> Steps[str]:
    """Read ``function``, the separator, the name and the opening fence; "" if they are not so."""
    yield from source.read_mark("function")
    if not (yield from source.read_mark(SEPARATOR)):
        return ""
    name = yield from source.text_until("\n", _CLOSING, "{", CALL_END)
    yield from source.read_space()
    yield from source.read_mark(_FENCE, _CLOSING)
    return name.strip()


FORMAT = ToolFormat(
    names=("deepseek_v3",),
    parse=lambda source, out, tools: read_calls(source, out, _read_name, closing=_CLOSING),
    write=lambda lark, offer: write_calls(lark, offer, _BEFORE, f"\n{_CLOSING}"),
    shown_by=((SEPARATOR,), ("```json",)),
    marks=MARKS,
)
