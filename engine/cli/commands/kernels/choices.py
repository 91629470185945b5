"""Show which implementation of each kernel runs on this machine, and why."""

from __future__ import annotations

import argparse

HELP = "which implementation runs for each family, and why"


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from kiln.jit_kernels.declare.settings import settings
    from kiln.jit_kernels.implementations import decide
    from kiln.jit_kernels.launchers.choose import launcher
    from kiln.jit_kernels.registry import all_specs

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    alike: dict[tuple[str, str], list[str]] = {}  # (toggle, what runs and why) -> families
    for family, what in decide(all_specs().values(), device).summary().items():
        alike.setdefault((settings().kernel_choice(family), what), []).append(family)
    table = Table("families", "toggle", "what runs, and why")
    for (toggle, what), families in alike.items():
        table.add_row(", ".join(families), toggle, what)
    console = Console()
    console.print(table)
    if device.type == "cuda":
        console.print(f"Launched through {launcher().name} (KILN_LAUNCHER).")
    else:
        console.print("No GPU here: KILN_CPU_KERNELS says whether kernels run on the CPU.")
    return 0
