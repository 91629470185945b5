"""The time of every kernel, and its fraction of the roofline, beside other implementations."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kiln.engine.cli.measuring import add_files, say_written
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    from kiln.engine.bench.report import Report
    from kiln.jit_kernels.declare.spec import KernelSpec

NAME = "kernels"
HELP = "every kernel: time, fraction of the roofline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the family and the choice of implementations."""
    parser.add_argument(
        "family", nargs="?", metavar="FAMILY", help="such as norm; default: every family"
    )
    parser.add_argument(
        "--peers", action="store_true", help="also measure other installed libraries"
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="skip torch.compile, which takes seconds per size"
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="smoke test, not a benchmark: run this command on a CPU at small sizes",
    )
    add_files(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the kernels; return 1 if one of Kiln's is wrong or failed."""
    import torch
    from rich.console import Console

    from kiln.engine.bench import kernels
    from kiln.engine.bench.report import write_json
    from kiln.jit_kernels.bench.measure import Wanted

    specs = _specs_of(args.family)
    if not args.cpu and not torch.cuda.is_available():
        raise ConfigError(
            "no GPU found, and a kernel's time on a CPU means nothing: run this on a GPU machine, "
            "or add --cpu to smoke-test the benchmark itself"
        )
    wanted = Wanted("cpu" if args.cpu else "cuda", compiled=not args.no_compile, peers=args.peers)
    with Console(stderr=True).status("") as status:
        report = kernels.measure(specs, wanted, status.update)
    _show_kernels(report)
    if args.json is not None:
        write_json(args.json, report.to_json())
    say_written(kernels.write(report, args.output) if args.output is not None else ())
    wrong = [row for row in report.rows if row["status"].startswith(("wrong result", "failed"))]
    return 1 if any(row["implementation"] in ("jit", "host") for row in wrong) else 0


def _specs_of(family: str | None) -> list[KernelSpec]:
    from kiln.jit_kernels.declare.families import families
    from kiln.jit_kernels.registry import operators

    if family is not None and family not in families():
        known = ", ".join(families())
        raise ConfigError(f"no kernel family is named {family!r}; there are {known}")
    return [spec for spec in operators() if family in (None, spec.family)]


def _show_kernels(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    from kiln.engine.bench import kernels
    from kiln.jit_kernels.bench.table import remarks, side_by_side

    titles, lines = side_by_side(report.rows)
    table = Table(title=kernels.processor(report), title_justify="left")
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < 2 else "right", no_wrap=number == 0)
    for line in lines:
        table.add_row(*line)
    console = Console()
    console.print(table)
    console.print(
        f"{kernels.roofs(report.details['ceilings'])}. µs: median of rounds; ±: "
        "interquartile range over the median."
    )
    for remark in remarks(report.rows):
        console.print(remark, markup=False, highlight=False)
