"""Output tokens per second of requests that are all submitted at once, in this process.

The lengths of prompts and outputs are random, the same in every run. The default load is that of
nano-vllm's benchmark.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from kiln.engine.cli.bench_model import add_bench_arguments, finish, measuring
from kiln.engine.cli.numbers import count, count_range

HELP = "output tokens per second of requests of random lengths, all submitted at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags and those of the load."""
    add_bench_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--num-prompts", type=count, default=256, metavar="N", help="requests; default 256"
    )
    for what in ("prompt", "output"):
        load.add_argument(
            f"--{what}-tokens",
            type=count_range,
            default=(100, 1024),
            metavar="LOW-HIGH",
            help=f"bounds of the {what}s' lengths; default 100-1024",
        )


def run(args: argparse.Namespace) -> int:
    """Measure Kiln, then the baseline. Raises KilnError."""
    from kiln.engine.bench import offline
    from kiln.engine.bench.choice import kiln_and
    from kiln.engine.bench.plots import draw_throughput
    from kiln.engine.bench.report import with_ratio
    from kiln.engine.bench.side_by_side import measure_all
    from kiln.engine.bench.workload import MixedLoad

    load = MixedLoad(args.num_prompts, args.prompt_tokens, args.output_tokens)
    with measuring(args, 1, load.longest) as (subject, python, tell):
        measured = measure_all(
            kiln_and(args.baseline, python, subject.config, tell, mixed=True),
            lambda engine: offline.measure(engine, load, subject.model.vocab_size, tell),
            tell,
        )
    measured.rows = with_ratio(measured.rows)
    return finish(args, subject, measured, asdict(load), offline.markdown, draw_throughput)
