"""Write the arguments of a call whose values stand as raw text between tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.source import Steps, TextSource
from kiln.engine.text.replies.typed_values import to_json, typed, types_of

Ends = Mapping[str, tuple[str, ...]]  # tags that end a value, with what comes after each


class TaggedArguments:
    """Writes the arguments of one call as a JSON object, one value after the other.

    A value that can only be a string is passed on as it arrives, any other when it is complete.
    """

    def __init__(self, source: TextSource, out: MessageBuilder, schema: Mapping[str, Any]) -> None:
        self._source, self._out = source, out
        self._schema = schema
        self._started = False

    def read_value(self, key: str, ends: Ends, *, trim: bool) -> Steps[str]:
        """Read a value and the tag that ends it, and return the tag; "" if the text ended.

        A tag ends the value only if one of those in ``ends`` comes after it, or the text ends:
        values may contain the tag. ``trim`` drops one line break at each end of the value.
        """
        types = types_of(self._schema, key)
        self._out.arguments(f"{', ' if self._started else '{'}{to_json(key)}: ")
        self._started = True
        pieces: list[str] = []
        value = _Text(self._out, trim) if types <= {"string"} else None
        if trim:
            yield from self._source.read_mark("\n")
        tag = yield from self._read_to(ends, value.add if value else pieces.append)
        if tag and value:
            self._out.arguments('"')
        elif tag:
            raw = "".join(pieces)
            self._out.arguments(typed(raw.removesuffix("\n") if trim else raw, types))
        return tag

    def _read_to(self, ends: Ends, emit: Callable[[str], None]) -> Steps[str]:
        """Pass the value to ``emit``; return the tag that ended it."""
        source = self._source
        while tag := (yield from source.read_until(tuple(ends), emit)):
            source.read(len(tag))
            space = yield from source.read_space()
            if (yield from source.may_begin(*ends[tag])):
                return tag
            emit(tag + space)
        return ""

    def close(self) -> None:
        """End the arguments."""
        self._out.arguments("}" if self._started else "{}")


class _Text:
    """Writes a JSON string piece by piece, without its last line break if ``trim``."""

    def __init__(self, out: MessageBuilder, trim: bool) -> None:
        self._out = out
        self._trim = trim
        self._held = ""  # a line break that may be the last
        out.arguments('"')

    def add(self, text: str) -> None:
        """Add text."""
        text = self._held + text
        kept = text.removesuffix("\n") if self._trim else text
        self._held = text[len(kept) :]
        self._out.arguments(to_json(kept)[1:-1])
