"""The log of a server that a benchmark starts: a file, which is kept if the benchmark fails."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

_SHOWN_LINES = 15


class ServerLog:
    """A file for the output of a server. ``name`` is a part of its name."""

    def __init__(self, name: str) -> None:
        self.file: IO[bytes] = tempfile.NamedTemporaryFile(  # noqa: SIM115 (it outlives a failure)
            prefix=f"kiln-bench-{name}-", suffix=".log", delete=False
        )
        self.path = Path(self.file.name)

    def end(self) -> str:
        """Return where the file is, and its last lines."""
        lines = self.path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return "\n".join([f"the end of its log {self.path}:", *lines[-_SHOWN_LINES:]])

    def close(self, *, keep: bool) -> None:
        """Close the file, and remove it unless it is kept."""
        self.file.close()
        if not keep:
            self.path.unlink(missing_ok=True)
