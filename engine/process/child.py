"""The parent's handle to the engine process: start, watch and stop it, and leave no orphan.

Parent and child communicate through two ZeroMQ sockets in a private folder (mode 0700). The child
also holds the read end of a pipe. However the parent ends, the pipe closes, and then the child
removes the folder and exits. This needs no signal, so none can be missed.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from kiln.engine.config import EngineConfig
from kiln.engine.config_forms import config_text
from kiln.engine.distributed.command import end_process, module_command, private_folder
from kiln.engine.distributed.process_state import cpu_seconds, end_group, is_stopped
from kiln.engine.errors import ConfigError


@dataclass
class EngineProcess:
    """One engine process. Make it with ``spawn``; ``stop`` is safe to call more than once."""

    child: subprocess.Popen[bytes]
    folder: Path
    started: float = field(default_factory=time.monotonic)
    _has_ended: bool = False  # its number, and that of its group, may be another's now

    @classmethod
    def spawn(cls, config: EngineConfig, command: list[str] | None = None) -> EngineProcess:
        """Start the engine and return before it is loaded.

        ``command`` replaces the worker in tests; folder and configuration are appended to it.
        Raises ConfigError if the program cannot be started.
        """
        command = command or module_command("kiln.engine.process.worker")
        folder = private_folder()
        try:
            child = subprocess.Popen(
                [*command, str(folder), config_text(config)],
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches only the parent, which then drains
            )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"cannot start the engine process {command[0]}: {error}") from error
        return cls(child, folder)

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; minus the signal number after a signal."""
        return self.child.poll()

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped by a signal (SIGSTOP)."""
        return is_stopped(self.child.pid)

    @property
    def cpu_seconds(self) -> float:
        """The processor time that the process has used."""
        return cpu_seconds(self.child.pid)

    def stop(self, grace: float = 0.0) -> bool:
        """Wait ``grace`` seconds for the process to exit, then kill it, and its ranks with it.

        Returns whether all of them have ended: one that a device driver holds does not.
        """
        if self._has_ended:
            return True
        if self.child.stdin is not None:
            self.child.stdin.close()
        code = end_process(self.child, grace)
        self._has_ended = code is not None and end_group(self.child.pid)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self._has_ended


def requests_address(folder: Path) -> str:
    """Return the address of the socket that carries requests to the engine."""
    return f"ipc://{folder}/requests"


def outputs_address(folder: Path) -> str:
    """Return the address of the socket that carries outputs to the client."""
    return f"ipc://{folder}/outputs"
