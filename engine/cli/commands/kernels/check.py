"""Run a kernel's own source on the CPU under the checker for races, bounds and alignment."""

from __future__ import annotations

import argparse

HELP = "run a kernel's own source on the CPU under the race and bounds checker"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the kernel and the number of seeds."""
    parser.add_argument("spec", help="a kernel's name, or all")
    parser.add_argument("--seeds", type=int, default=3, help="interleavings to try (default 3)")


def run(args: argparse.Namespace) -> int:
    """Check; return 1 if there are findings."""
    from rich.console import Console

    from kiln.engine.cli.targets import specs_named
    from kiln.jit_kernels.check.schedules import check_kernel
    from kiln.jit_kernels.declare.errors import KernelError
    from kiln.jit_kernels.declare.settings import settings

    specs, seeds = specs_named(args.spec), args.seeds
    if seeds < 1:
        raise KernelError(f"--seeds {seeds}: want 1 or more")
    console = Console()
    found = 0
    for spec in specs:
        with console.status(f"checking {spec.name}"):
            findings = check_kernel(spec, seeds=seeds, env=settings())
        found += len(findings)
        cases = len(list(spec.variants())) * len(spec.sizes) * seeds
        console.print(f"{spec.name}: {cases} runs, {len(findings)} findings")
        for finding in findings:
            console.print(f"  {finding}", markup=False, highlight=False)
    return 1 if found else 0
