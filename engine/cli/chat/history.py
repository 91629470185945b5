"""The lines that a user typed, for the arrow keys, kept in a file from one chat to the next.

The file is in the user's folder for state, for this user alone. It has a line of JSON for each
message, as a message may have several lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
from pathlib import Path

from kiln.cache.env import user_state_home

try:
    import readline
except ImportError:  # some builds of Python lack it: no editing and no history
    readline = None  # type: ignore[assignment]

_MOST = 1000  # messages
_LONGEST = 4096  # characters of one that is kept
_SECRET = re.compile(r"\b(sk-|hf_|gh[a-z]_|glpat-|xox[a-z]-|AKIA)[\w-]{8}|\bBearer\s+\S{8}", re.I)


def typed() -> str:
    """Return what stands at the prompt, also if a Ctrl-C has just dropped it."""
    return "" if readline is None else str(readline.get_line_buffer())


def history_file() -> Path | None:
    """Return the file, or None without a usable home."""
    home = user_state_home()
    return None if home is None else home / "kiln" / "chat_history"


class History:
    """The history of a chat. ``path`` None: it is not kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if readline is not None:
            readline.set_auto_history(False)
            readline.clear_history()
            for text in self._read():
                readline.add_history(text)

    def add(self, text: str) -> None:
        """Add a message, unless it begins with a space, has what looks like a key, or is long."""
        if readline is None or not text.strip() or text[0].isspace():
            return
        if _SECRET.search(text) or len(text) > _LONGEST:
            return
        last = readline.get_current_history_length()
        if last and readline.get_history_item(last) == text:
            return
        readline.add_history(text)
        if self._path is not None:
            self._write(f"{json.dumps(text)}\n", os.O_APPEND)

    def _read(self) -> list[str]:
        """Return what is kept, and cut the file if it has grown to twice its size."""
        if self._path is None:
            return []
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # none yet; one that cannot be read cannot be written either
            return []
        if len(lines) > 2 * _MOST:
            self._write("".join(f"{line}\n" for line in lines[-_MOST:]), os.O_TRUNC)
        found: list[str] = []
        for line in lines[-_MOST:]:
            with contextlib.suppress(ValueError):  # a line that was cut off
                text = json.loads(line)
                found += [text] if isinstance(text, str) else []
        return found

    def _write(self, text: str, how: int) -> None:
        """Write to the file, or say once why the history is not kept."""
        assert self._path is not None
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | how
            with open(os.open(self._path, flags, 0o600), "w", encoding="utf-8") as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) != 0o600:
                    os.fchmod(file.fileno(), 0o600)
                file.write(text)
        except OSError as error:
            told = f"the history is not kept: {self._path}: {error.strerror}"
            print(told, file=sys.stderr)
            self._path = None
