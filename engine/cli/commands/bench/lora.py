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

from kiln.engine.cli.bench_model import add_bench_arguments, add_step_arguments, finish, measuring
from kiln.engine.cli.numbers import count, counts
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    from kiln.engine.bench.lora import LoRALoad

HELP = "what LoRA adapters add to the time of a decode step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags and those of the load."""
    add_bench_arguments(parser, ("vllm",))
    add_step_arguments(parser, (1, 64))
    load = parser.add_argument_group("adapters")
    load.add_argument(
        "--adapters",
        type=partial(counts, least=0),
        default=(0, 1, 8),
        metavar="LIST",
        help="distinct adapters of a step; 0: loaded, not used; a number above a batch size is "
        "left out there; default 0,1,8",
    )
    load.add_argument("--rank", type=count, default=16, metavar="N", help="of each; default 16")


def run(args: argparse.Namespace) -> int:
    """Measure Kiln without and with adapters, then the baseline. Raises KilnError."""
    from kiln.engine.bench import lora
    from kiln.engine.bench.choice import by_product, kiln_and
    from kiln.engine.bench.kiln_engine import MustFit
    from kiln.engine.bench.lora_adapters import RandomAdapter
    from kiln.engine.bench.side_by_side import measure_all

    load = _load(args)
    room = MustFit(load.largest, load.longest)
    with (
        measuring(args, load.largest, load.longest) as (subject, python, tell),
        tempfile.TemporaryDirectory(prefix="kiln-bench-lora-") as parent,
    ):
        config = subject.config
        tell("writing an adapter")
        adapter = RandomAdapter.of_model(
            Path(config.model.model), load.rank, subject.dtype, overrides=config.model.overrides
        )
        adapter.save(Path(parent))
        subject.measure_machine(tell)
        adapted = adapter.configure(config, Path(parent), load.most)
        measured = measure_all(
            by_product(
                {
                    suffix: kiln_and(args.baseline, python, each, tell, room)
                    for suffix, each in (("", config), (" with LoRA", adapted))
                }
            ),
            lambda engine: lora.measure(engine, load, subject.model.vocab_size, tell),
            tell,
        )
    # Each rank reads the whole of A or of B, and a part of the other: the bytes are not known here.
    known = config.parallel.tensor_parallel_size == 1
    measured.rows = lora.complete(
        measured.rows, lambda number: subject.copy_ms(number * adapter.num_bytes) if known else None
    )
    about = asdict(load) | {
        "context": load.context,
        "num_adapters": load.most,
        "adapter_bytes": adapter.num_bytes,
    }
    return finish(args, subject, measured, about, lora.markdown, lora.draw)


def _load(args: argparse.Namespace) -> LoRALoad:
    """Return the load. Raises ConfigError if no batch has enough requests for any number."""
    from kiln.engine.bench.lora import LoRALoad

    load = LoRALoad(
        args.batch_sizes, args.prompt_tokens, args.output_tokens, args.adapters, args.rank
    )
    if load.most == 0:
        raise ConfigError(
            f"--adapters {min(args.adapters)}: a request has one adapter, and --batch-sizes has at "
            f"most {load.largest} requests: give a larger batch, or fewer adapters"
        )
    return load
