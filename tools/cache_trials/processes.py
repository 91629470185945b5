"""Child processes by fork: cheap enough to kill by the thousand.

The parent must have one thread and only fork-safe libraries.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

RAISED = 4  # exit code of a child that ended by an exception


def fork(target: Callable[..., None], *args: Any) -> int:
    """Run a function in a child until it is killed or exits; return the child's id."""
    pid = os.fork()
    if pid == 0:
        try:
            random.seed()
            os.nice(5)  # so that the parent, which kills them, gets to run
            target(*args)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(RAISED)
    return pid


def end(pid: int, *, kill: bool = True) -> int:
    """Kill a child, or wait for its exit; return its exit code, or minus the signal."""
    if kill:
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Child:
    """A function that runs in a child process and returns its result as JSON."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._reader, writer = os.pipe()

        def tell() -> None:
            with os.fdopen(writer, "w") as file:
                json.dump(function(), file)
            os._exit(0)

        self._pid = fork(tell)
        os.close(writer)

    def result(self) -> Any:
        """Wait; return the result, or None if the child failed, with a report on stderr."""
        with os.fdopen(self._reader) as file:
            text = file.read()
        return json.loads(text) if end(self._pid, kill=False) == 0 else None
