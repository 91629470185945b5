"""What a benchmark shows on stderr while it runs. rich is optional: GPU machines may lack it."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiln.engine.bench.serving import Shown


@contextmanager
def measuring_display() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is running now.

    On a terminal it is one line with the elapsed time; otherwise a line for each new text.
    """
    if not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        last = ""

        def say_once(text: str) -> None:
            nonlocal last
            if text != last:
                last = text
                say(text)

        yield say_once
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)
        yield lambda text: bars.update(task, description=text)


@contextmanager
def load_display() -> Iterator[Shown]:
    """Yield what shows how many requests of a load have ended: on a terminal, as a bar."""
    from kiln.engine.bench.serving import Shown

    if not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield Shown(lambda what, total: say(f"{what}: {total} requests"))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Few refreshes: the client and the server need the processor.
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bars:
        task = bars.add_task("", total=None)

        def begin(what: str, total: int) -> None:
            bars.reset(task, description=what, total=total)

        yield Shown(begin, lambda: bars.advance(task))


def add_files(parser: argparse._ActionsContainer) -> None:
    """Add the flags of what a benchmark writes."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="write JSON, a table and plots there"
    )


def say(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)
