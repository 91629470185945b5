"""The time of every kernel, and its fraction of the roofline, beside other implementations."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from kiln.engine.cli.bench_model import write_out
from kiln.engine.cli.measuring import add_files, measuring_display
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    from kiln.jit_kernels.declare.spec import KernelSpec

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

    from kiln.engine.bench import kernels

    specs = _specs_of(args.family)
    if not args.cpu and not torch.cuda.is_available():
        raise ConfigError(
            "no GPU found, and a kernel's time on a CPU means nothing: run this on a GPU machine, "
            "or add --cpu to smoke-test the benchmark itself"
        )
    choice = {"compiled": not args.no_compile, "beside_peers": args.peers}
    with measuring_display() as tell:
        report = kernels.measure(specs, "cpu" if args.cpu else "cuda", tell, **choice)
    write_out(args, report, kernels.markdown(report), partial(kernels.write, report))
    wrong = [row for row in report.rows if row["status"].startswith(("wrong result", "failed"))]
    return 1 if any(row["implementation"] in ("jit", "host") for row in wrong) else 0


def _specs_of(family: str | None) -> list[KernelSpec]:
    from kiln.jit_kernels.declare.families import families
    from kiln.jit_kernels.registry import operators

    if family is not None and family not in families():
        known = ", ".join(families())
        raise ConfigError(f"no kernel family is named {family!r}; there are {known}")
    return [spec for spec in operators() if family in (None, spec.family)]
