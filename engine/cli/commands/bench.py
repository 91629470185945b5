"""Measure Kiln.

``serving``: output tokens a second and latencies over HTTP, with a baseline. ``kernels``: every
kernel's time, its share of what the machine can do, and the other ways to run it beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kiln.engine.cli.options import add_engine_arguments

NAME = "bench"
HELP = "measure serving over HTTP, or every kernel, beside a baseline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of measurement."""
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", dest="kind", required=True)
    _add_kernels(kinds.add_parser("kernels", help="every kernel: time, share of the roofline"))
    serving = kinds.add_parser("serving", help="a server under concurrent streams")
    add_engine_arguments(serving)
    load = serving.add_argument_group("load")
    load.add_argument("--url", help="measure this server; default: one of MODEL, on a free port")
    load.add_argument("--num-prompts", type=int, default=128, metavar="N", help="default 128")
    load.add_argument("--concurrency", type=int, default=16, metavar="N", help="default 16")
    load.add_argument(
        "--prompt-tokens", type=int, default=48, metavar="N", help="the longest prompt; default 48"
    )
    load.add_argument(
        "--output-tokens", type=int, default=64, metavar="N", help="of each answer; default 64"
    )
    load.add_argument(
        "--baseline",
        choices=("none", "transformers"),
        default="none",
        help="run the same prompts through transformers' generate afterwards",
    )
    load.add_argument(
        "--output", type=Path, metavar="FOLDER", help="write JSON, a table and a plot there"
    )


def _add_kernels(kernels: argparse.ArgumentParser) -> None:
    kernels.add_argument(
        "family", nargs="?", metavar="FAMILY", help="such as norm; default: every family"
    )
    kernels.add_argument(
        "--peers", action="store_true", help="also kernels of other libraries that are installed"
    )
    kernels.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out: seconds a size"
    )
    kernels.add_argument(
        "--cpu",
        action="store_true",
        help="no benchmark: run this command's own code on a CPU, at small sizes",
    )
    kernels.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    kernels.add_argument(
        "--output", type=Path, metavar="DIR", help="write JSON, a table and rooflines there"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files."""
    if args.kind == "kernels":
        from kiln.engine.cli.bench_kernels import bench_kernels

        return bench_kernels(args)
    from kiln.engine.cli.bench_serving import bench_serving

    return bench_serving(args)
