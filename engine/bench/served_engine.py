"""An engine behind a server, which the serving benchmark starts, or which runs already."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from kiln.engine.bench.engine import BenchError
from kiln.engine.bench.load_client import Target
from kiln.engine.bench.report import Row
from kiln.engine.bench.server_log import ServerLog
from kiln.engine.bench.serving import Load, Shown, measure, served_model
from kiln.engine.errors import KilnError

Server = AbstractContextManager[tuple[str, subprocess.Popen[Any] | None]]  # URL, and process if any
_ENDING = 2.0  # seconds that a process may take to end after its last answer
Start = Callable[[ServerLog], Server]


class ServedEngine:
    """A server that is ready.

    ``start`` opens it, with a file for its log. ``find_versions`` asks it for those of its
    packages. Raises BenchError, with the end of the log, if it does not start; then, and if a
    measurement fails, the log is kept.
    """

    def __init__(
        self,
        name: str,
        start: Start,
        find_versions: Callable[[str], Mapping[str, str]] = lambda url: {},
    ) -> None:
        self.name = name
        self._log, self._opened, self._failed = ServerLog(name), ExitStack(), False
        begun = time.perf_counter()
        try:
            self.url, self._process = self._opened.enter_context(start(self._log))
            self.load_seconds = time.perf_counter() - begun
            self.versions = find_versions(self.url)
        except KilnError as error:
            self._close_after_failure()
            if str(self._log.path) in str(error):
                raise
            raise BenchError(f"{name}: {error}; {self._log.end()}") from error
        except BaseException:
            self._close_after_failure()
            raise

    def measure(
        self, load: Load, shown: Shown, *, api_key: str | None = None, is_chat: bool = False
    ) -> Iterator[Row]:
        """Yield a row for each point. Raises LoadError, and BenchError if the server ends."""
        try:
            target = Target(self.url, served_model(self.url, api_key), api_key, is_chat)
            for row in measure(self.name, target, load, shown):
                yield row
                self._check()
        except KilnError:
            self._failed = self._process is not None
            self._check(_ENDING)
            raise

    def close(self) -> None:
        """Stop the server, if it was started."""
        self._opened.close()
        self._log.close(keep=self._failed)

    def _check(self, patience: float = 0.0) -> None:
        """Raise BenchError if the server has ended, or ends now."""
        if self._process is None:
            return
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return
        self._failed = True
        raise BenchError(f"{self.name}: its server ended with exit code {code}; {self._log.end()}")

    def _close_after_failure(self) -> None:
        self._opened.__exit__(*sys.exc_info())
        self._log.close(keep=True)
