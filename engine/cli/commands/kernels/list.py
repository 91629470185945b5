"""List every kernel: its compiled variants, and the GPU resources that they use.

Registers are per thread and shared memory per block, both the maximum over compiled variants and
targets. Spills are instructions that move a register to memory and back.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kiln.engine.cli.targets import add_arch_argument, declared_jobs

if TYPE_CHECKING:
    from kiln.jit_kernels.compile.warmup import Job

HELP = "every kernel: compiled variants, registers, shared memory, spills"
_WIDTH_WITH_TEMPLATES = 110  # characters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_arch_argument(parser)
    parser.add_argument("--json", action="store_true", help="one row per variant and target")


def run(args: argparse.Namespace) -> int:
    """Print the table, or one JSON list."""
    rows = [_row(job) for job in declared_jobs(args.arch)]
    if args.json:
        print(json.dumps(rows))
        return 0
    from rich.console import Console

    console = Console()
    console.print(_table(rows, console.width))
    return 0


def _row(job: Job) -> dict[str, Any]:
    """Look up one program; ``tier`` is "" if it is not compiled."""
    from kiln.jit_kernels.compile.build import look_up
    from kiln.jit_kernels.compile.open_cache import kernel_cache
    from kiln.jit_kernels.toolchains.cubin import resources_of

    spec = job.spec
    row = {
        "kernel": spec.name,
        "variant": dict(job.variant),
        "arch": job.arch,
        "template": spec.source,
        "paper": spec.paper,
        "tier": "",
    }
    built, _ = look_up(spec, job.variant, job.arch, kernel_cache())
    if built is None:
        return row
    resources = resources_of(built.cubin)[spec.entry]
    known = {"tier": built.tier, "key": built.key, "cubin_bytes": len(built.cubin)}
    return row | known | asdict(resources)


def _table(rows: list[dict[str, Any]], width: int) -> Any:
    """Return a row for each kernel; its template only where the numbers leave room for it."""
    from rich import box
    from rich.table import Table

    table = Table(title="templates are in kernel_sources/", title_justify="left", box=box.SIMPLE)
    table.pad_edge, table.padding = False, (0, 0)
    table.add_column("kernel", no_wrap=True)
    for name in ("variants", "built", "registers", "shared", "stack", "spills"):
        table.add_column(name, justify="right", no_wrap=True)
    with_template = width >= _WIDTH_WITH_TEMPLATES
    if with_template:
        table.add_column("template", no_wrap=True)
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        built = [row for row in mine if row["tier"]]
        variants = {json.dumps(row["variant"]) for row in mine}
        largest = (_largest(built, name) for name in _COLUMNS)
        count = f"{len(built)} of {len(mine)}"
        template = [mine[0]["template"]] if with_template else []
        table.add_row(kernel, str(len(variants)), count, *largest, *template)
    return table


_COLUMNS = ("registers", "shared_bytes", "stack_bytes", "spills")


def _largest(rows: Iterable[dict[str, Any]], name: str) -> str:
    return str(max((row[name] for row in rows), default="-"))
