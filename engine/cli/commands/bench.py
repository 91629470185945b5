"""Measure Kiln. ``serving``: output tokens a second and latencies over HTTP, with a baseline."""

from __future__ import annotations

import argparse
from pathlib import Path

from kiln.engine.cli.options import add_engine_arguments

NAME = "bench"
HELP = "measure serving over HTTP, beside a baseline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of measurement."""
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", dest="kind", required=True)
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


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files."""
    from kiln.engine.cli.bench_serving import bench_serving

    return bench_serving(args)
