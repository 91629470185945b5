"""Run a local ``kiln serve`` inside a ``with`` block."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Any

from kiln.engine.distributed.command import end_process, module_command
from kiln.engine.errors import KilnError

_STOP_SECONDS = 15.0


class ServerStartError(KilnError):
    """The server did not become ready; the message ends with its last output."""


@contextmanager
def local_server(
    arguments: Sequence[str],
    timeout: float = 120.0,
    program: Sequence[str] | None = None,
    log: IO[bytes] | None = None,
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve on a free port and yield (URL, process) after the model is loaded.

    ``arguments`` are those of ``kiln serve``; ``program`` replaces the ``kiln`` command in tests.
    ``log`` gets what the server says on stderr. At the end the server is asked to stop, and is
    killed if it does not exit. Raises ServerStartError if it is not ready in ``timeout`` seconds.
    """
    program = program or module_command("kiln.engine.cli.main")
    command = [*program, "serve", *arguments, "--port", "0"]
    with ExitStack() as opened:
        said = log or opened.enter_context(tempfile.TemporaryFile())
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        try:
            yield _wait_for_url(server, said, timeout), server
        finally:
            server.terminate()
            end_process(server, _STOP_SECONDS)


def _wait_for_url(server: subprocess.Popen[str], said: IO[Any], timeout: float) -> str:
    """Read the server's output up to its URL, which it prints when ready."""
    assert server.stdout is not None
    timer = threading.Timer(timeout, server.kill)
    timer.start()
    try:
        for line in server.stdout:
            if line.startswith(("http://", "https://")):
                return line.split()[0]
    finally:
        timer.cancel()
    said.seek(0)
    last = "\n".join(said.read().decode(errors="replace").strip().splitlines()[-3:])
    code = server.wait()
    raise ServerStartError(f"kiln serve ended with exit code {code}: {last}")
