"""Show the KILN_ environment variables: those that are set, then each one with its values."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kiln.cache.env import Variable

HELP = "show every KILN_ environment variable"
_WIDEST = 100  # columns: longer lines are hard to read


def run(args: argparse.Namespace) -> int:
    """Print what is set, then all."""
    from kiln.cache.env import describe, read
    from kiln.jit_kernels.declare.families import families

    rows = describe(families(), read(families()))
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    changed = [row for row in rows if row.value != row.default]
    print("Set to other than the default:" if changed else "Every variable has its default.")
    for row in changed:
        print(f"  {row.name}={row.value}")
    for names, row in _alike(rows):
        print()
        for line in _entry(names, row, width):
            print(line)
    return 0


def _alike(rows: Iterable[Variable]) -> Iterator[tuple[list[str], Variable]]:
    """Yield each variable, and as one those of kernel families that differ in nothing else."""
    groups: dict[tuple[str, str, str], tuple[list[str], Variable]] = {}
    for row in rows:
        family = row.name.removeprefix("KILN_").lower()
        text = row.help.replace(f"the {family} kernels", "its family of kernels")
        names, _ = groups.setdefault((row.values, row.default, text), ([], replace(row, help=text)))
        names.append(row.name)
    yield from groups.values()


def _entry(names: list[str], row: Variable, width: int) -> list[str]:
    """Return the lines of a variable: its name, values and default, then its meaning."""
    head = ", ".join(names)
    if row.values:
        head += f" = {row.values}"
    if row.default:
        head += f"; default {row.default}"
    lines = textwrap.wrap(head, width, subsequent_indent="  ", break_on_hyphens=False)
    return [
        *lines,
        *textwrap.wrap(row.help, width, initial_indent="    ", subsequent_indent="    "),
    ]
