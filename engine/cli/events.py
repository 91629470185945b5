"""Read server-sent events, by the rules of the format.

Lines end with CR, LF or both, and with nothing else: U+2028 may stand inside of one, where
``str.splitlines`` would cut it. Source: WHATWG HTML, section 9.2.6.
"""

from __future__ import annotations

import re

_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class EventReader:
    """Collects the bytes of a stream; the events do not depend on how it was cut."""

    def __init__(self) -> None:
        self._rest = b""  # of the last line
        self._data: list[str] = []  # of the event that is not complete
        self._is_first = True

    def push(self, chunk: bytes) -> list[str]:
        """Return the data of each event that these bytes complete."""
        found: list[str] = []
        text, start = self._rest + chunk, 0
        for end in _END.finditer(text):
            if end.end() == len(text) and end.group() == b"\r":
                break  # a line feed that belongs to it may follow
            event = self._line(text[start : end.start()])
            start = end.end()
            if event is not None:
                found.append(event)
        self._rest = text[start:]
        return found

    def _line(self, line: bytes) -> str | None:
        """Take a line; return an event's data if the line ends one."""
        if self._is_first:
            line, self._is_first = line.removeprefix(_BOM), False
        if not line:
            data, self._data = self._data, []
            return "\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode(errors="replace"))
        return None
