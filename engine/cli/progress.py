"""Show the progress of loading: bars on a terminal, else one line per stage."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from kiln.engine.models.progress import amount, announcement

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


logger = logging.getLogger(__name__)


class LoadingLog:
    """Logs each stage when it begins, for a log that programs read."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take note of a stage's progress."""
        if stage not in self._begun:
            self._begun.add(stage)
            logger.info("%s", announcement(stage, total))

    def close(self) -> None:
        """Do nothing: a log needs no end."""


class LoadingDisplay:
    """Call it with each stage's progress; ``close`` it when loading succeeds or fails.

    ``quiet``: it shows nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bars: Progress | None = None
        self._stages: dict[str, TaskID | None] = {}
        if sys.stderr.isatty() and not quiet:
            from rich import progress as rich
            from rich.console import Console

            self._bars = rich.Progress(
                rich.TextColumn("{task.description:<17}"),
                rich.BarColumn(),
                rich.TextColumn("{task.fields[amount]}"),
                rich.TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bars.start()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` units of a stage are done; 0 in total: unknown."""
        if self._bars is None:
            if stage not in self._stages and not self._quiet:  # it begins
                self._stages[stage] = None
                print(f"{announcement(stage, total)} …", file=sys.stderr, flush=True)
            return
        task = self._stages.get(stage)
        if task is None:
            task = self._stages[stage] = self._bars.add_task(stage, amount="")
        elapsed = self._bars.tasks[self._bars.task_ids.index(task)].elapsed
        text = amount(stage, done, total, elapsed or 0.0)
        self._bars.update(task, completed=done, total=total or None, amount=text)

    def close(self) -> None:
        """Restore the terminal."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
