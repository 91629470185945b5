"""Show which implementation of each kernel runs on this machine, and why."""

from __future__ import annotations

import argparse

NAME = "choices"
HELP = "which implementation runs for each family, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from kiln.jit_kernels.implementations import decide
    from kiln.jit_kernels.launchers.choose import launcher
    from kiln.jit_kernels.registry import all_specs
    from kiln.jit_kernels.settings import settings

    has_gpu = torch.cuda.is_available()
    table = Table("family", "toggle", "variants", "runs", "because")
    for family, *row in decide(
        all_specs().values(), torch.device("cuda" if has_gpu else "cpu")
    ).table():
        table.add_row(family, settings().kernel_choice(family), *row)
    console = Console()
    console.print(table)
    if has_gpu:
        console.print(f"Launched through {launcher().name} (KILN_LAUNCHER).")
    else:
        console.print(
            f"No GPU here: this is for the CPU, with KILN_CPU_KERNELS={settings().cpu_kernels}."
        )
    return 0
