"""Start a module of this copy of Kiln in a new process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import kiln

KILL_SECONDS = 30.0  # for a killed process to end
_LONGEST_PATH = 80  # of the folder; that of a Unix socket in it has at most 107 bytes
# Kiln's folder is first in sys.path only while Kiln is imported, then last: if it is site-packages,
# it may contain backports that shadow the standard library.
_BOOT = (
    "import sys; root = sys.argv.pop(1); sys.path.insert(0, root); import kiln; del sys.path[0]; "
    "root in sys.path or sys.path.append(root); "
    "from {module} import main; sys.exit(main(sys.argv[1:]))"
)


def module_command(module: str) -> list[str]:
    """Return the command that calls ``main(arguments) -> int`` of a module in a new Python process.

    The child imports this copy of Kiln even if another is installed, and modules in the working
    folder do not shadow its imports (``-P``).
    """
    root = str(Path(kiln.__file__).parents[1])
    return [sys.executable, "-P", "-c", _BOOT.format(module=module), root]


def end_process(process: subprocess.Popen[Any], seconds: float) -> int | None:
    """Wait some seconds for a process to exit, then kill it; return its exit code.

    None if it does not end although it was killed: a device driver may hold it.
    """
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        return process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def private_folder() -> Path:
    """Make a folder that only this user can read (mode 0700), for sockets and rendezvous files."""
    folder = Path(tempfile.mkdtemp(prefix="kiln-"))
    if len(str(folder)) > _LONGEST_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="kiln-", dir="/tmp"))
    return folder
