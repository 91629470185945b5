"""Read JSON as it arrives: what was read is the beginning of a valid value, or there is an error.

Nothing here recurses, so nesting costs no stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from kiln.engine.text.replies.source import Steps, TextSource

MAX_DEPTH = 200  # readers of other languages stop at some hundreds, Python's at about a thousand
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_PART = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[a-z]*")
_HEX = frozenset("0123456789abcdefABCDEF")

Emit = Callable[[str], None]


class BrokenJsonError(ValueError):
    """The text is no JSON, or ends inside of it.

    ``unread``: what was read of it without being passed on.
    """

    def __init__(self, unread: str = "") -> None:
        super().__init__(unread)
        self.unread = unread


def read_value(source: TextSource, emit: Emit) -> Steps[None]:
    """Read one value; ``emit`` gets its text as it is written.

    The one difference: a control character inside a string becomes its escape. Models write line
    breaks into strings, and JSON does not allow them. Raises BrokenJsonError before the first
    character that cannot continue a value.
    """
    closers: list[str] = []
    while True:
        char = yield from source.peek()
        if char in ("{", "["):
            if len(closers) == MAX_DEPTH:
                raise BrokenJsonError
            emit(source.read(1))
            closers.append("}" if char == "{" else "]")
            emit((yield from source.read_space()))
            if (yield from source.peek()) != closers[-1]:
                if char == "{":
                    yield from read_key(source, emit)
                continue
        elif char == '"':
            yield from read_string(source, emit)
        else:
            yield from _read_scalar(source, emit)
        if not (yield from _read_ends(source, emit, closers)):
            return


def _read_ends(source: TextSource, emit: Emit, closers: list[str]) -> Steps[bool]:
    """Read what may follow a value: closing brackets, then a comma. Whether a value must follow."""
    while closers:
        emit((yield from source.read_space()))
        char = yield from source.peek()
        if char == closers[-1]:
            emit(source.read(1))
            closers.pop()
        elif char == ",":
            emit(source.read(1))
            emit((yield from source.read_space()))
            if closers[-1] == "}":
                yield from read_key(source, emit)
            return True
        else:
            raise BrokenJsonError
    return False


def read_key(source: TextSource, emit: Emit) -> Steps[None]:
    """Read a key with its colon, and the white space after it. Raises BrokenJsonError."""
    yield from read_string(source, emit)
    emit((yield from source.read_space()))
    if (yield from source.peek()) != ":":
        raise BrokenJsonError
    emit(source.read(1))
    emit((yield from source.read_space()))


def read_string(source: TextSource, emit: Emit) -> Steps[None]:
    """Read a string with its quotes. Raises BrokenJsonError."""
    if (yield from source.peek()) != '"':
        raise BrokenJsonError
    emit(source.read(1))
    while True:
        yield from source.read_while(_PLAIN, emit)
        char = yield from source.peek()
        if char == '"':
            emit(source.read(1))
            return
        if char == "\\":
            emit((yield from _read_escape(source)))
        elif char:
            emit(json.dumps(source.read(1))[1:-1])
        else:
            raise BrokenJsonError


def _read_escape(source: TextSource) -> Steps[str]:
    text = source.read(1)
    char = yield from source.peek()
    if not char or char not in '"\\/bfnrtu':
        raise BrokenJsonError(text)
    text += source.read(1)
    for _ in range(4 if char == "u" else 0):
        if (yield from source.peek()) not in _HEX:
            raise BrokenJsonError(text)
        text += source.read(1)
    return text


def _read_scalar(source: TextSource, emit: Emit) -> Steps[None]:
    text = (yield from source.text_while(_WORD)) or (yield from source.text_while(_NUMBER_PART))
    if text not in ("true", "false", "null") and not _NUMBER.fullmatch(text):
        raise BrokenJsonError(text)
    emit(text)


def whole_object(text: str) -> str | None:
    """Return a complete text as the text of a JSON object; None if it is not one."""
    source, pieces = TextSource(), list[str]()
    source.add(text.strip())
    source.end()
    if not text.strip().startswith("{"):
        return None
    try:
        for _ in read_value(source, pieces.append):
            raise AssertionError("an ended source never waits")
    except BrokenJsonError:
        return None
    return "".join(pieces) if source.at_end else None
