"""The processes that descend from this one, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_BY_THEMSELVES_SECONDS = 1.0  # Ray's agents notice the end of their parent, but some take longer
_POLL_SECONDS = 0.05


class Descendants:
    """Processes that descend from this one now, by process id and time of their start.

    Ray's are ended by ``ray.shutdown``, except for agents and workers that are slow to notice it.
    They must be known before it: a process whose parent has ended is no descendant any more.
    """

    def __init__(self) -> None:
        self._found: dict[int, str] = {}
        self.update()

    def update(self) -> None:
        """Add those that have started since."""
        parents, started = {}, {}
        for folder in Path("/proc").glob("[0-9]*"):
            if stat := _stat(int(folder.name)):
                parents[int(folder.name)], started[int(folder.name)] = int(stat[1]), stat[19]
        ours = {os.getpid()}
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        self._found |= {pid: started[pid] for pid in ours - {os.getpid()}}

    def end(self) -> None:
        """Wait a little for those that still run, then kill them, and wait until they are gone."""
        patience = time.monotonic() + _BY_THEMSELVES_SECONDS
        while left := self.running():
            if time.monotonic() > patience:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def running(self) -> list[int]:
        """Return the ids of those that still run; another process may have an id by now."""
        stats = {pid: _stat(pid) for pid in self._found}
        return [
            pid
            for pid, stat in stats.items()
            if stat is not None and stat[19] == self._found[pid] and stat[0] not in "ZX"
        ]


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name: state, parent, …, start as the 20th."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
