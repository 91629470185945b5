"""What Linux says about the processes of an engine, whether or not they can speak for themselves.

Source: proc_pid_stat(5).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from kiln.engine.distributed.command import KILL_SECONDS

# Seconds for which a stopped process (SIGSTOP) is tolerated. A process that is busy, however long,
# is never in this state, and neither is one that a debugger or a profiler holds.
STOPPED_LIMIT = 2.5
_STATE, _GROUP, _USER_TICKS, _SYSTEM_TICKS, _NUM_THREADS = 0, 2, 11, 12, 17  # behind the name


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP)."""
    fields = _stat(pid)
    return bool(fields) and fields[_STATE] == "T"


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used; 0 if it is gone."""
    fields = _stat(pid)
    if not fields:
        return 0.0
    return (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / os.sysconf("SC_CLK_TCK")


def end_group(group: int) -> bool:
    """Kill all processes of a group, and wait until they have ended; return whether they have.

    The group's leader has been waited for, so that another process may have its number now: a
    process with this number is left alone.
    """
    until = time.monotonic() + KILL_SECONDS
    while left := _members(group):
        if time.monotonic() > until:
            return False
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return True


def _members(group: int) -> list[int]:
    """Return the processes of a group but its leader; a zombie holds nothing, and is none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        fields = _stat(pid)
        if pid == group or not fields or int(fields[_GROUP]) != group:
            continue
        if fields[_STATE] not in "ZX" or int(fields[_NUM_THREADS]) > 1:
            found.append(pid)
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields behind the name of a process; empty if it is gone."""
    try:
        # The name is in parentheses, and may contain some.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
