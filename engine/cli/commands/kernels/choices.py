"""Show which implementation of each kernel runs on this machine, and why: a row for each reason."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kiln.engine.cli.lines import hang

if TYPE_CHECKING:
    from kiln.jit_kernels.implementations import Decision

HELP = "which implementation runs for each family, and why"


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs for one reason. ``families``: family -> the variants for which it does."""

    implementation: str
    reason: str
    families: dict[str, list[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flag."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the rows, or one JSON object."""
    import torch

    from kiln.engine.runner.kernels import with_limits
    from kiln.jit_kernels.declare.settings import settings
    from kiln.jit_kernels.implementations import decide
    from kiln.jit_kernels.launchers.choose import launcher
    from kiln.jit_kernels.registry import all_specs

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = with_limits(decide(all_specs().values(), device).made, device)
    choices = group_choices(made)
    by = launcher().name if device.type == "cuda" else None
    if args.json:
        import json
        from dataclasses import asdict

        families = dict.fromkeys(one.spec.family for one in made)
        toggles = {name: settings().kernel_choice(name) for name in families}
        rows = [asdict(one) for one in choices]
        report = {"device": str(device), "launcher": by, "toggles": toggles, "choices": rows}
        print(json.dumps(report))
        return 0
    for choice in choices:
        print(*_lines(choice, choices), "", sep="\n")
    last = "No GPU here: KILN_CPU_KERNELS says whether kernels run on the CPU."
    if by is not None:
        last = f"Launched through {by} (KILN_LAUNCHER)."
    print(*hang("", last), sep="\n")
    return 0


def group_choices(made: Iterable[Decision]) -> list[Choice]:
    """Return the reasons for what runs, that of the most variants first."""
    from kiln.jit_kernels.declare.spec import label

    found: dict[tuple[str, str], Choice] = {}
    for one in made:
        choice = Choice(one.implementation, one.reason, {})
        choice = found.setdefault((one.implementation, one.reason), choice)
        names = choice.families.setdefault(one.spec.family, [])
        name = label(one.spec, one.variant)
        if name not in names:
            names.append(name)
    return sorted(found.values(), key=_size, reverse=True)


def _size(choice: Choice) -> int:
    return sum(map(len, choice.families.values()))


def _lines(choice: Choice, choices: Iterable[Choice]) -> list[str]:
    """Return a reason and its families; of those that run otherwise too, the fewer variants."""
    parts = []
    for family, names in sorted(choice.families.items()):
        most = max((one.families.get(family, []) for one in choices), key=len)
        parts.append(family if len(names) == len(most) else f"{family} ({', '.join(names)})")
    why = hang("", f"{choice.implementation}: {choice.reason}", 2)
    return [*why, *hang("    ", ", ".join(parts))]
