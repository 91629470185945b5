"""The time of one decode step at several batch sizes, in this process.

For each batch size, that many requests run together, greedily, to a fixed number of output tokens.
A step's time is the difference between a long and a short run. On a GPU each row also says how long
the GPU works in a step, and the shortest time in which it could read what a step needs.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from kiln.engine.cli.bench_model import add_bench_arguments, bench_config, check_baseline, finish
from kiln.engine.cli.measuring import measuring_display
from kiln.engine.cli.numbers import count, counts

NAME = "latency"
HELP = "the time of a decode step at several batch sizes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags and those of the load."""
    add_bench_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--batch-sizes",
        type=counts,
        default=(1, 16, 64, 256),
        metavar="LIST",
        help="requests that run together; default 1,16,64,256",
    )
    load.add_argument(
        "--prompt-tokens", type=count, default=128, metavar="N", help="of each; default 128"
    )
    load.add_argument(
        "--output-tokens", type=count, default=128, metavar="N", help="steps timed; default 128"
    )


def run(args: argparse.Namespace) -> int:
    """Measure Kiln, then the baseline. Raises KilnError."""
    from kiln.engine.bench import latency
    from kiln.engine.bench.choice import static_or_vllm
    from kiln.engine.bench.kiln_engine import KilnEngine, MustFit
    from kiln.engine.bench.report import command_line
    from kiln.engine.bench.side_by_side import Subject, make_report, measure_all

    load = latency.LatencyLoad(args.batch_sizes, args.prompt_tokens, args.output_tokens)
    room = MustFit(load.largest, load.longest)
    with bench_config(args, load.largest, load.longest) as (name, config):
        python = check_baseline(args, config)
        subject = Subject(name, config)
        with measuring_display() as tell:
            tell("measuring the machine")
            subject.measure_machine()
            measured = measure_all(
                {
                    "kiln": lambda: KilnEngine(config, tell, room),
                    **static_or_vllm(args.baseline, config, python),
                },
                lambda engine: latency.measure(engine, load, subject.model.vocab_size, tell),
                tell,
            )
    measured.rows = latency.complete(
        measured.rows, lambda size: subject.floor_ms(size, load.context)
    )
    about = asdict(load) | {"context": load.context}
    report = make_report(NAME, command_line("kiln"), subject, measured, about)
    return finish(args, report, latency.markdown(report), latency.draw, measured.failure)
