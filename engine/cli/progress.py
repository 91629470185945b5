"""Show the progress of loading: bars on a terminal, else one line per stage."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kiln.engine.process.wire import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars


class LoadingDisplay:
    """Call it with each progress message; ``close`` it when loading succeeds or fails.

    ``quiet``: it shows nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bars: Bars | None = None
        self._stages: dict[str, object] = {}
        if sys.stderr.isatty() and not quiet:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            self._bars = RichProgress(
                TextColumn("{task.description:<24}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bars.start()

    def __call__(self, message: Progress) -> None:
        """Show one message."""
        if self._bars is None:
            if message.stage not in self._stages and not self._quiet:  # it begins
                self._stages[message.stage] = message
                print(f"{message.stage} …", file=sys.stderr, flush=True)
            return
        task = self._stages.get(message.stage)
        if task is None:
            task = self._stages[message.stage] = self._bars.add_task(message.stage)
        self._bars.update(task, completed=message.done, total=message.total or None)  # type: ignore[arg-type]

    def close(self) -> None:
        """Restore the terminal."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
