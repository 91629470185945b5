"""The time of one decode step at several batch sizes, in this process.

For each batch size, that many requests run together, greedily, to a fixed number of output tokens.
A step's time is the difference between a long and a short run. On a GPU each row also says how long
the GPU works in a step, and the shortest time in which it could read what a step needs.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from kiln.engine.cli.bench_model import add_bench_arguments, add_step_arguments, finish, measuring

HELP = "the time of a decode step at several batch sizes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags and those of the load."""
    add_bench_arguments(parser)
    add_step_arguments(parser, (1, 16, 64, 256))


def run(args: argparse.Namespace) -> int:
    """Measure Kiln, then the baseline. Raises KilnError."""
    from kiln.engine.bench import latency
    from kiln.engine.bench.choice import kiln_and
    from kiln.engine.bench.kiln_engine import MustFit
    from kiln.engine.bench.side_by_side import measure_all

    load = latency.LatencyLoad(args.batch_sizes, args.prompt_tokens, args.output_tokens)
    room = MustFit(load.largest, load.longest)
    with measuring(args, load.largest, load.longest) as (subject, python, tell):
        subject.measure_machine(tell)
        measured = measure_all(
            kiln_and(args.baseline, python, subject.config, tell, room),
            lambda engine: latency.measure(engine, load, subject.model.vocab_size, tell),
            tell,
        )
    measured.rows = latency.complete(
        measured.rows, lambda size: subject.floor_ms(size, load.context)
    )
    about = asdict(load) | {"context": load.context}
    return finish(args, subject, measured, about, latency.markdown, latency.draw)
