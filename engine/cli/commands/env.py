"""Show the KILN_ environment variables: those that are set, then each one with its values."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kiln.cache.env import Variable

HELP = "show every KILN_ environment variable"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flag."""
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def run(args: argparse.Namespace) -> int:
    """Print what is set, then all."""
    from kiln.cache.env import describe, read
    from kiln.jit_kernels.declare.families import families

    rows = describe(families(), read(families()))
    changed = [row for row in rows if row.value != row.default]
    if args.json:
        print(json.dumps([{**asdict(row), "changed": row in changed} for row in rows]))
        return 0
    print("Set to other than the default:" if changed else "Every variable has its default.")
    for row in changed:
        print(f"  {row.name}={row.value}")  # as it can be copied, however long
    for names, row in _alike(rows):
        print(*_entry(names, row), sep="\n")
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


def _entry(names: list[str], row: Variable) -> list[str]:
    """Return the lines of a variable: its name, values and default, then its meaning."""
    from kiln.engine.cli.lines import hang

    head = ", ".join(names)
    if row.values:
        head += f" = {row.values}"
    if row.default:
        head += f"; default {row.default}"
    return ["", *hang("", head, 2), *hang("    ", row.help)]
