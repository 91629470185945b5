"""The engine process as its parent sees it: started, watched, stopped, never left behind.

Parent and child talk through two ZeroMQ sockets in a private folder (mode 0700), and the child
holds the read end of a pipe: when the parent is gone, however it went, the pipe closes and the
child leaves and removes the folder. No signal is needed for that, so none can be missed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import kiln
from kiln.engine import wire
from kiln.engine.config import EngineConfig
from kiln.engine.errors import ConfigError

_LONGEST_ADDRESS = 100  # a Unix socket's path holds at most 107 bytes
# Kiln's folder comes first for the import of Kiln alone, and last for the rest: as site-packages
# it may hold backports of modules of the standard library.
_BOOT = (
    "import sys; root = sys.argv.pop(1); sys.path.insert(0, root); import kiln; del sys.path[0]; "
    "root in sys.path or sys.path.append(root); "
    "from {module} import main; sys.exit(main(sys.argv[1:]))"
)


def module_command(module: str) -> list[str]:
    """Return the command that calls ``main(arguments) -> int`` of a module in a fresh Python.

    The child imports this very Kiln, even where another one is installed, and nothing in the
    working folder shadows its modules (``-P``).
    """
    root = str(Path(kiln.__file__).parents[1])
    return [sys.executable, "-P", "-c", _BOOT.format(module=module), root]


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kiln-"))
    if len(str(folder)) > _LONGEST_ADDRESS - len("ipc:///requests"):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="kiln-", dir="/tmp"))
    return folder


@dataclass
class EngineProcess:
    """One engine process. Make it with ``spawn``; ``stop`` is safe to call more than once."""

    child: subprocess.Popen[bytes]
    folder: Path
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def spawn(cls, config: EngineConfig, command: list[str] | None = None) -> EngineProcess:
        """Start the engine and return at once, while it loads.

        ``command`` stands in for the worker in tests; folder and configuration are added to it.
        Raises ConfigError if the program cannot be started.
        """
        command = command or module_command("kiln.engine.worker")
        folder = _private_folder()
        try:
            child = subprocess.Popen(
                [*command, str(folder), wire.encode_config(config)],
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then drains
            )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"cannot start the engine process {command[0]}: {error}") from error
        return cls(child, folder)

    @property
    def requests_address(self) -> str:
        """Where the engine reads requests."""
        return requests_address(self.folder)

    @property
    def outputs_address(self) -> str:
        """Where the engine writes outputs."""
        return outputs_address(self.folder)

    @property
    def exit_code(self) -> int | None:
        """None while the process lives; negative after a signal of that number."""
        return self.child.poll()

    def stop(self, grace: float = 0.0) -> int:
        """Wait ``grace`` seconds for the process to leave, then end it; return its exit code."""
        if self.child.stdin is not None:
            self.child.stdin.close()
        try:
            self.child.wait(grace)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.child.returncode


def requests_address(folder: Path) -> str:
    """Return the address of the socket that carries requests to the engine."""
    return f"ipc://{folder}/requests"


def outputs_address(folder: Path) -> str:
    """Return the address of the socket that carries outputs to the client."""
    return f"ipc://{folder}/outputs"
