"""Check this machine, or a checkpoint: what Kiln can use, what is missing, and what follows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiln.engine.cli.diagnosis import Finding

HELP = "check this machine, or what of a checkpoint Kiln serves and how"
_MARKS = {"ok": "[green]ok[/]", "missing": "[yellow]missing[/]", "broken": "[red]broken[/]"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the checkpoint, and the model for the memory plan."""
    parser.add_argument(
        "checkpoint",
        metavar="MODEL",
        nargs="?",
        help="check this folder instead of the machine, by its small files and the headers of its "
        "weights; a hub id is downloaded before",
    )
    parser.add_argument("--model", metavar="MODEL", help="for the memory plan; default: demo model")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="start an engine with random weights of the model's shapes to measure the plan",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them prevents serving."""
    from kiln.engine.cli.diagnosis import examine
    from kiln.engine.cli.measuring import measuring_display
    from kiln.engine.cli.memory_plan import measure_memory
    from kiln.engine.cli.options import DEMO_FOLDER
    from kiln.engine.errors import ConfigError
    from kiln.engine.models.model_folder import resolve_model_folder

    if args.checkpoint is not None:
        from kiln.engine.cli.doctor_model import examine_model

        if args.model is not None or args.measure:
            raise ConfigError("--model and --measure are for the machine: want no MODEL with them")
        return _show(examine_model(resolve_model_folder(args.checkpoint)), as_json=args.json)
    folder = resolve_model_folder(args.model) if args.model else DEMO_FOLDER
    if args.measure:
        with measuring_display() as tell:
            show = lambda stage, done, total: tell(f"{stage} {done}/{total}")  # noqa: E731
            findings = examine(folder, partial(measure_memory, progress=show))
    else:
        findings = examine(folder)
    return _show(findings, as_json=args.json)


def _show(findings: Sequence[Finding], *, as_json: bool) -> int:
    """Print the findings; return 1 if one is "broken"."""
    import json
    from dataclasses import asdict

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    served = all(one.state != "broken" for one in findings)
    if as_json:
        print(json.dumps({"ok": served, "findings": [asdict(one) for one in findings]}))
        return int(not served)
    table = Table("", "What", "Found", "Meaning", box=None, pad_edge=False)
    for one in findings:
        table.add_row(_MARKS[one.state], one.name, escape(one.found), escape(one.meaning))
    Console().print(table)
    return int(not served)
