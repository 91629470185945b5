"""Check this machine, or a checkpoint: what Kiln can use, what is missing, and what follows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kiln.engine.cli.engine_flags import MODEL
from kiln.engine.cli.flags import add_group, group_of

if TYPE_CHECKING:
    from pathlib import Path

    from kiln.engine.cli.diagnosis import Finding
    from kiln.engine.config import ModelConfig

HELP = "check this machine, or what of a checkpoint Kiln serves and how"
_COLOURS = {"ok": "green", "missing": "yellow", "broken": "red"}
_SETTINGS = group_of(
    "settings of the model", MODEL, "--revision", "--hf-overrides", "--dtype", "--quantization"
)


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
    add_group(parser, _SETTINGS)


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them prevents serving."""
    from kiln.engine.errors import ConfigError

    if args.checkpoint is not None:
        from kiln.engine.cli.doctor_model import examine_model

        if args.model is not None or args.measure:
            raise ConfigError("--model and --measure are for the machine: want no MODEL with them")
        findings = examine_model(*_model(args, args.checkpoint))
    else:
        findings = _examine_machine(args)
    return _show(findings, as_json=args.json)


def _model(args: argparse.Namespace, name: str) -> tuple[Path, ModelConfig]:
    """Return the folder of a model, and its settings by the flags. Raises KilnError."""
    from kiln.engine.cli.options import model_config
    from kiln.engine.models.model_folder import resolve_model_folder

    settings = model_config(args, name, _SETTINGS)
    return resolve_model_folder(settings.model, settings.revision), settings


def _examine_machine(args: argparse.Namespace) -> list[Finding]:
    """Run every check of this machine. Raises KilnError."""
    from kiln.engine.cli.diagnosis import examine
    from kiln.engine.cli.measuring import measuring_display
    from kiln.engine.cli.memory_plan import measure_memory, plan_memory
    from kiln.engine.cli.options import DEMO_FOLDER

    folder, settings = _model(args, args.model or str(DEMO_FOLDER))
    if not args.measure:
        return examine(folder, partial(plan_memory, model=settings))
    with measuring_display() as tell:
        show = lambda stage, done, total: tell(f"{stage} {done}/{total}")  # noqa: E731
        return examine(folder, partial(measure_memory, progress=show, model=settings))


def _show(findings: Sequence[Finding], *, as_json: bool) -> int:
    """Print the findings; return 1 if one is "broken"."""
    import json
    from dataclasses import asdict

    from kiln.engine.cli.lines import hang, styled

    served = all(one.state != "broken" for one in findings)
    if as_json:
        print(json.dumps({"ok": served, "findings": [asdict(one) for one in findings]}))
        return int(not served)
    column = min(max(len(one.name) for one in findings), 24)
    for one in findings:
        head = f"{one.state:<7}  {one.name:<{column}}  "
        first, *rest = hang(head, one.found, 11 + column)
        print(first.replace(one.state, styled(one.state, _COLOURS[one.state]), 1))
        if one.meaning:
            rest += hang(" " * (11 + column) + "→ ", one.meaning)
        print(*rest, sep="\n", end="\n" * bool(rest))
    return int(not served)
