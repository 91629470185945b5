"""Measure Kiln, alone or beside other engines.

``latency``: the time of a decode step at several batch sizes. ``lora``: how much LoRA adapters add
to it. ``prefill``: prompt tokens per second by prompt length and token budget. ``offline``: output
tokens per second of many requests that arrive at once. ``serving``: the same and latencies over
HTTP. ``kernels``: each kernel's time, its fraction of the roofline, and the same for alternative
implementations.
"""

from __future__ import annotations

import argparse

from kiln.engine.cli import bench_kinds
from kiln.engine.cli.parser import add_commands

HELP = (
    "benchmark decode steps, LoRA adapters, prefill, throughput, serving over HTTP, or every kernel"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds: the modules in bench_kinds/, structured like the commands."""
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", dest="kind", required=True)
    add_commands(kinds, bench_kinds)
