"""Read tool calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import json

from kiln.engine.text.replies.json_text import BrokenJsonError, read_key, read_value, whole_object
from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.source import Steps, TextSource

ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset(("name", "id", "type", *ARGUMENTS))


def read_arguments(source: TextSource, out: MessageBuilder) -> Steps[bool]:
    """Read one value as the arguments of a call that has begun.

    False if it is broken: the arguments end before the fault, and the rest is content.
    """
    try:
        yield from read_value(source, out.arguments)
    except BrokenJsonError as error:
        out.content(error.unread)
        return False
    return True


class JsonCall:
    """Reads one object as a call.

    The call begins with the first character of its arguments if the name came before them; from
    then on each valid character is passed on, so that clients see long arguments grow. With
    another order of keys it begins when the object is complete.
    """

    def __init__(self, source: TextSource, out: MessageBuilder, *, bare: bool = False) -> None:
        self._source, self._out = source, out
        self._bare = bare  # no mark announced it: it must look like a call from its first key on
        self._name = self._arguments = ""
        self._begun = False

    def read(self) -> Steps[bool]:
        """Read the object. False if it is broken, or no call.

        Call ``record`` of the source first: if there is no call, what was read becomes content.
        """
        try:
            yield from self._read_members()
            self._begin_late()
        except BrokenJsonError as error:
            self._out.content(error.unread if self._begun else self._source.recorded())
            return False
        return True

    def _read_members(self) -> Steps[None]:
        source, closer = self._source, ","
        if (yield from source.peek()) != "{":
            raise BrokenJsonError
        source.read(1)
        yield from source.read_space()
        if (yield from source.peek()) == "}":
            raise BrokenJsonError
        while closer == ",":
            yield from source.read_space()
            yield from self._read_member()
            yield from source.read_space()
            closer = yield from source.read_mark(",", "}")
        if not closer:
            raise BrokenJsonError

    def _read_member(self) -> Steps[None]:
        source, pieces = self._source, list[str]()
        yield from read_key(source, pieces.append)
        key = json.loads("".join(pieces).rstrip()[:-1])
        if self._bare and key not in _KEYS:
            raise BrokenJsonError
        pieces.clear()
        is_object = (yield from source.peek()) == "{"
        if key in ARGUMENTS and is_object and self._name and not self._begun:
            self._begin()
            yield from read_value(source, self._out.arguments)
            return
        yield from read_value(source, pieces.append)
        text = "".join(pieces)
        if key == "name":
            self._name = _name(text)
        elif key in ARGUMENTS:
            self._arguments = text

    def _begin(self) -> None:
        self._source.recorded()
        self._out.call(self._name)
        self._begun = True

    def _begin_late(self) -> None:
        """Begin the call at the end of its object."""
        if self._begun:
            return
        text = self._arguments
        if not self._name or (self._bare and not text):
            raise BrokenJsonError
        if text.startswith('"'):  # an object that was serialized twice
            text = json.loads(text)
        found = "{}" if text in ("", "null") else whole_object(text)
        if found is None:
            raise BrokenJsonError
        self._begin()
        self._out.arguments(found)


def _name(text: str) -> str:
    """Return a JSON string's value. Raises BrokenJsonError if it can be no name."""
    value = json.loads(text) if text.startswith('"') else ""
    if not value.strip() or any("\ud800" <= char <= "\udfff" for char in value):
        raise BrokenJsonError
    return str(value)
