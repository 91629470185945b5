"""What LoRA adapters cost a decode step, in this process.

For each number of adapters and each batch size, that many requests run together, greedily, and use
the adapters in turn. A step is timed as in ``kiln bench latency``, first in an engine without
adapters, then in one that has loaded them; its growth is that over the former. The adapters are
random, on all projections of attention and MLP.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kiln.engine.cli.bench_model import add_bench_arguments, bench_config, check_baseline, finish
from kiln.engine.cli.measuring import measuring_display
from kiln.engine.cli.numbers import count, counts
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    from kiln.engine.bench.lora import LoRALoad

NAME = "lora"
HELP = "what LoRA adapters add to the time of a decode step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags and those of the load."""
    add_bench_arguments(parser, ("vllm",))
    load = parser.add_argument_group("load")
    load.add_argument(
        "--adapters",
        type=partial(counts, least=0),
        default=(0, 1, 8),
        metavar="LIST",
        help="distinct adapters of a step; 0: loaded, not used; a number above a batch size is "
        "left out there; default 0,1,8",
    )
    load.add_argument("--rank", type=count, default=16, metavar="N", help="of each; default 16")
    load.add_argument(
        "--batch-sizes",
        type=counts,
        default=(1, 64),
        metavar="LIST",
        help="requests that run together; default 1,64",
    )
    load.add_argument(
        "--prompt-tokens", type=count, default=128, metavar="N", help="of each; default 128"
    )
    load.add_argument(
        "--output-tokens", type=count, default=128, metavar="N", help="steps timed; default 128"
    )


def run(args: argparse.Namespace) -> int:
    """Measure Kiln without and with adapters, then the baseline. Raises KilnError."""
    from kiln.engine.bench import lora, lora_plot
    from kiln.engine.bench.choice import without_and_with_lora
    from kiln.engine.bench.kiln_engine import MustFit
    from kiln.engine.bench.lora_adapters import RandomAdapter
    from kiln.engine.bench.report import command_line
    from kiln.engine.bench.side_by_side import Subject, make_report, measure_all

    load = _load(args)
    room = MustFit(load.steps.largest, load.steps.longest)
    with (
        bench_config(args, load.steps.largest, load.steps.longest) as (name, config),
        tempfile.TemporaryDirectory(prefix="kiln-bench-lora-") as parent,
        measuring_display() as tell,
    ):
        python = check_baseline(args, config)
        subject = Subject(name, config)
        tell("writing an adapter")
        adapter = RandomAdapter.of_model(Path(config.model.model), load.rank, subject.dtype)
        adapter.save(Path(parent))
        tell("measuring the machine")
        subject.measure_machine()
        adapted = adapter.configure(config, Path(parent), load.most)
        measured = measure_all(
            without_and_with_lora(args.baseline, config, adapted, python, tell, room),
            lambda engine: lora.measure(engine, load, subject.model.vocab_size, tell),
            tell,
        )
    # Each rank reads the whole of A or of B, and a part of the other: the bytes are not known here.
    known = config.parallel.tensor_parallel_size == 1
    measured.rows = lora.complete(
        measured.rows, lambda number: subject.copy_ms(number * adapter.num_bytes) if known else None
    )
    about = asdict(load) | {
        "context": load.steps.context,
        "num_adapters": load.most,
        "adapter_bytes": adapter.num_bytes,
    }
    report = make_report(NAME, command_line("kiln"), subject, measured, about)
    return finish(args, report, lora.markdown(report), lora_plot.draw, measured.failure)


def _load(args: argparse.Namespace) -> LoRALoad:
    """Return the load. Raises ConfigError if no batch has enough requests for any number."""
    from kiln.engine.bench.lora import LoRALoad

    load = LoRALoad(
        args.adapters, args.rank, args.batch_sizes, args.prompt_tokens, args.output_tokens
    )
    if load.most == 0:
        raise ConfigError(
            f"--adapters {min(args.adapters)}: a request has one adapter, and --batch-sizes has at "
            f"most {load.steps.largest} requests: give a larger batch, or fewer adapters"
        )
    return load
