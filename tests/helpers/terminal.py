"""A command in a terminal of its own, typed into and read as a person would."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence

from kiln.engine.distributed.command import module_command

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


class Terminal:
    """The terminal of a running ``kiln``."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self._number = number
        self.process = process
        self.raw = ""  # all that was shown
        self._seen = 0  # characters of ``shown`` that were waited for

    @property
    def shown(self) -> str:
        """What was shown, without styles and movements."""
        return _CONTROL.sub("", self.raw).replace("\r\n", "\n")

    def type(self, text: str) -> None:
        """Press keys; "\\x03" is Ctrl-C."""
        os.write(self._number, text.encode())

    def until(self, end: str, seconds: float = 60.0) -> str:
        """Wait until more is shown, and ends with a text; return all that is shown."""
        last = time.monotonic() + seconds
        while not self._has(end):
            left = max(0.0, last - time.monotonic())
            assert select.select([self._number], [], [], left)[0], f"want {end!r}: {self.shown}"
            assert left, f"want {end!r}: {self.shown}"
            assert self._more(), f"it ended, want {end!r}: {self.shown}"
        return self.shown

    def press_until(self, key: str, end: str) -> str:
        """Press a key, again each second, until what is shown ends with a text.

        Python's prompt misses a Ctrl-C that comes just before it begins to wait for a key.
        """
        for _ in range(60):
            self.type(key)
            last = time.monotonic() + 2
            while select.select([self._number], [], [], 1)[0] and time.monotonic() < last:
                assert self._more(), f"it ended, want {end!r}: {self.shown}"
                if self._has(end):
                    return self.shown
        raise AssertionError(f"want {end!r}: {self.shown}")

    def ended(self, key: str = "") -> int:
        """Press a key until the process ends; return its exit code."""
        for _ in range(60):
            if key:
                self.type(key)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
                while self._more():
                    pass
                return self.process.returncode
        raise AssertionError(f"it still runs: {self.shown}")

    def _has(self, end: str) -> bool:
        shown = self.shown
        if len(shown) <= self._seen or not shown.endswith(end):
            return False
        self._seen = len(shown)
        return True

    def _more(self) -> bool:
        try:
            data = os.read(self._number, 4096)
        except OSError:  # the other side is closed
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def terminal(
    words: Sequence[str], environment: Mapping[str, str], columns: int = 80
) -> Iterator[Terminal]:
    """Run ``kiln`` with some words in a terminal; end it with the block."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [*module_command("kiln.engine.cli.main"), *words],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        start_new_session=True,
        preexec_fn=lambda: _own(secondary),
        env={**kept, "TERM": "xterm", "OMP_NUM_THREADS": "1", **environment},
    ) as process:
        os.close(secondary)
        try:
            yield Terminal(primary, process)
        finally:
            process.kill()
            os.close(primary)


def _own(number: int) -> None:
    fcntl.ioctl(number, termios.TIOCSCTTY, 0)
    # A shell that starts the tests in the background ignores Ctrl-C, and so do all it starts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
