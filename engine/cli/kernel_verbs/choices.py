"""Show which implementation runs for each family on this machine's GPU, and why."""

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

    from kiln.jit_kernels.choose import prepare
    from kiln.jit_kernels.launchers.choose import launcher
    from kiln.jit_kernels.registry import all_specs
    from kiln.jit_kernels.settings import settings

    table = Table("family", "toggle", "runs", "because")
    for choice in prepare(all_specs().values()):
        toggle = settings().kernel_choice(choice.family)
        table.add_row(choice.family, toggle, choice.implementation, choice.reason)
    console = Console()
    console.print(table)
    if torch.cuda.is_available():
        console.print(f"Launched through {launcher().name} (KILN_LAUNCHER).")
    else:
        mode = settings().cpu_kernels
        console.print(f"No GPU here: on the CPU, KILN_CPU_KERNELS={mode} decides.")
    return 0
