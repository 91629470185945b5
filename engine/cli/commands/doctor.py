"""Check this machine: what Kiln can use, what is missing, and what does not work without it."""

from __future__ import annotations

import argparse
from functools import partial

HELP = "check this machine: Python, GPU, compilers, kernel cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model for the memory plan."""
    parser.add_argument("--model", metavar="MODEL", help="for the memory plan; default: demo model")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="start an engine with random weights of the model's shapes to measure the plan",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them prevents serving."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from kiln.engine.cli.diagnosis import examine
    from kiln.engine.cli.measuring import measuring_display
    from kiln.engine.cli.memory_plan import measure_memory
    from kiln.engine.cli.options import DEMO_FOLDER
    from kiln.engine.models.model_folder import resolve_model_folder

    marks = {"ok": "[green]ok[/]", "missing": "[yellow]missing[/]", "broken": "[red]broken[/]"}
    folder = resolve_model_folder(args.model) if args.model else DEMO_FOLDER
    if args.measure:
        with measuring_display() as tell:
            show = lambda stage, done, total: tell(f"{stage} {done}/{total}")  # noqa: E731
            findings = examine(folder, partial(measure_memory, progress=show))
    else:
        findings = examine(folder)
    table = Table("", "What", "Found", "Meaning", box=None, pad_edge=False)
    for one in findings:
        table.add_row(marks[one.state], one.name, escape(one.found), escape(one.meaning))
    Console().print(table)
    return int(any(one.state == "broken" for one in findings))
