"""One ``kiln serve`` on a free loopback port, which ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kiln.engine.distributed.command import module_command

# prctl(PR_SET_PDEATHSIG, SIGTERM) makes Linux stop the server when the thread that started it ends,
# even if SIGKILL ended it. If the parent process has changed, the thread ended before this call.
_LAUNCH = (
    "import ctypes, os, sys; parent = int(sys.argv[1]); "
    "ctypes.CDLL(None).prctl(1, 15) == 0 or sys.exit('prctl failed'); "
    "os.getppid() == parent or sys.exit('the replica is gone'); os.execv(sys.argv[2], sys.argv[2:])"
)
_LAST_LINES = 20
_FLUSH_SECONDS = 5.0  # for the last lines of a server that could not start


class KilnProcess:
    """A running ``kiln serve``. Start it in a thread that lives as long as the server should.

    ``folder``: relative paths in ``arguments`` start there. ``on_exit`` is called from another
    thread if the server ends and ``stop`` was not called.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, on_exit: Callable[[], None]) -> None:
        kiln = module_command("kiln.engine.cli.main")
        command = [*kiln, "serve", *arguments, "--host", "127.0.0.1", "--port", "0"]
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder if folder.is_dir() else None,
            start_new_session=True,  # Ctrl-C reaches only the command, which asks Ray to stop
            text=True,
            errors="replace",
        )
        self._on_exit = on_exit
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._said_url = threading.Event()
        self._stopping = False
        self.url: str | None = None
        self._reader = threading.Thread(target=self._read, name="kiln-output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name="kiln-end", daemon=True).start()

    def wait_for_url(self) -> str:
        """Return the URL when the model is loaded. Raises RuntimeError if the server ended."""
        self._said_url.wait()
        if self.url is None:
            code, last = self._child.wait(), "\n".join(self._lines)
            raise RuntimeError(f"kiln serve ended with exit code {code}:\n{last}")
        return self.url

    def stop(self, timeout: float) -> None:
        """Ask the server to stop; kill it and its children after ``timeout`` seconds."""
        self._stopping = True
        self._child.terminate()
        try:
            self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()

    def _read(self) -> None:
        """Pass the output on to Ray's log; the line with the URL means that the server is ready."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.append(line.rstrip())
            print(line, end="", flush=True)
            if self.url is None and line.startswith("http://"):
                self.url = line.split()[0]
                self._said_url.set()

    def _watch(self) -> None:
        """Wait for the server's end. Its output may end later, with its engine process."""
        self._child.wait()
        if self.url is None:
            self._reader.join(_FLUSH_SECONDS)
            self._said_url.set()
        elif not self._stopping:
            self._on_exit()
