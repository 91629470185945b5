"""Show every KILN_ environment variable: accepted values, default, and current value."""

from __future__ import annotations

import argparse

NAME = "env"
HELP = "show every KILN_ environment variable"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kiln.cache.env import describe, read
    from kiln.jit_kernels.declare.families import families

    table = Table(box=None, pad_edge=False)
    table.add_column("Variable", no_wrap=True)
    for name in ("Values", "Default", "Now", "Meaning"):
        table.add_column(name)
    for row in describe(families(), read(families())):
        now = Text(row.value, style="" if row.value == row.default else "bold")
        table.add_row(row.name, row.values, row.default, now, row.help)
    Console().print(table)
    return 0
