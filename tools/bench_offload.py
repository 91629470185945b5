#!/usr/bin/env python3
"""Time second turns of conversations whose KV blocks went to host memory and come back.

    python tools/bench_offload.py [--model llama3-8b] [--output benchmarks]

Conversations take their first turns one after the other; the KV pool is too small for all of them.
Their second turns are timed with the blocks in host memory, and computed again. Then rows decode
while second turns come, and the steps during which blocks are copied are compared with others.
Weights are random. Writes kv_offload.{json,md}.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
ANSWER, QUESTION = 16, 32  # tokens of a first answer, and of the question of a second turn
LEAST_TIMES_FASTER, MOST_LONGER = 3.0, 0.03
GIB = 2**30

if TYPE_CHECKING:
    from kiln.engine.core import EngineCore


def main() -> None:
    """Measure, and write JSON and a page."""
    args = _arguments()
    sys.path.insert(0, str(ROOT / "tools" / "import_root"))
    from kiln.engine.bench.report import Report, command_line, table
    from kiln.engine.bench.shapes import SHAPES, write_shape

    with tempfile.TemporaryDirectory() as parent:
        named = args.model in SHAPES
        folder = write_shape(args.model, Path(parent)) if named else Path(args.model)
        core = _engine(args, folder)
        try:
            row = _measure(core, args)
        finally:
            core.close()
    load = {key: value for key, value in vars(args).items() if key != "output"}
    columns = {
        "second turn, ms": "{from_host_ms:.1f}", "computed again, ms": "{computed_ms:.1f}",
        "times faster": "{times_faster:.2f}", "bar": "{least_times_faster}",
        "step, ms": "{quiet_step_ms:.3f}", "while copying, ms": "{copying_step_ms}",
        "longer": "{longer}", "bar for it": "{most_longer}",
    }  # fmt: skip
    text = (
        f"{args.conversations} conversations of {args.tokens} tokens, a KV pool of {args.pool_gib} "
        f"GiB, {args.host_gib} GiB of host memory; {args.rows} rows decode in the last part. Times "
        "are medians; a second turn's ends with its first token."
    )
    report = Report("kv_offload", command_line("tools/bench_offload.py"), [row], load)
    page = report.markdown("KV blocks in host memory", text, table(columns, [row]))
    print(page)
    report.write(args.output, "kv_offload", page)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b", help="a built-in shape, or a folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pool-gib", type=float, default=15.0)
    parser.add_argument("--host-gib", type=float, default=40.0)
    parser.add_argument("--conversations", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=512, help="of the rows that decode")
    parser.add_argument("--steps", type=int, default=8, help="without copies, before each turn")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    return parser.parse_args()


def _engine(args: argparse.Namespace, folder: Path) -> EngineCore:
    from kiln.engine.config_forms import offline_config
    from kiln.engine.core import EngineCore
    from kiln.engine.kv.pool import KVShape
    from kiln.engine.models.registry import read_model
    from kiln.engine.runner.device import resolve_device, resolve_dtype

    _, model = read_model(folder)
    dtype = resolve_dtype("auto", model.dtype, resolve_device(args.device))
    block_bytes = 16 * KVShape(model.attention, dtype).bytes_per_token
    settings: Any = {
        "device": args.device,
        "load_format": "dummy",
        "max_model_len": max(
            args.tokens + 64, args.context + (args.steps + 64) * args.conversations
        ),
        "num_kv_blocks": int(args.pool_gib * GIB // block_bytes),
        "kv_offload_gib": args.host_gib,
        "max_num_seqs": args.rows + 1,
        "cuda_graph_bs": [args.rows, args.rows + 1],
        "seed": 0,
    }
    begun = time.perf_counter()
    core = EngineCore(offline_config(str(folder), settings), eos=frozenset())
    print(f"ready after {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    return core


def _measure(core: EngineCore, args: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(0)
    prompts = [_text(core, chance, args.tokens) for _ in range(args.conversations)]
    first = [_turn(core, f"first-{index}", one, ANSWER) for index, one in enumerate(prompts)]
    again = [
        [*prompt, *answer, *_text(core, chance, QUESTION)]
        for prompt, (answer, _, _) in zip(prompts, first, strict=True)
    ]
    before = core.stats().kv_offload_loaded_blocks
    from_host = [_turn(core, f"host-{index}", one) for index, one in enumerate(again)]
    loaded = core.stats().kv_offload_loaded_blocks - before
    steps = _decode(core, chance, args, again)
    computed = []
    for index, one in enumerate(again):
        core.reset_prefix_cache()
        computed.append(_turn(core, f"computed-{index}", one))
    host_ms, computed_ms = (statistics.median(ms for _, ms, _ in x) for x in (from_host, computed))
    return {
        "from_host_ms": host_ms,
        "computed_ms": computed_ms,
        "times_faster": computed_ms / host_ms,
        "least_times_faster": LEAST_TIMES_FASTER,
        "first_turn_ms": statistics.median(ms for _, ms, _ in first),
        "cached_tokens": statistics.median(cached for _, _, cached in from_host),
        "loaded_blocks": loaded,
        "host_blocks": core.stats().kv_offload_blocks,
        **steps,
        "most_longer": MOST_LONGER,
        "from_host_each_ms": [ms for _, ms, _ in from_host],
        "computed_each_ms": [ms for _, ms, _ in computed],
    }


def _text(core: EngineCore, chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(core.runner.vocab_size) for _ in range(length)]


def _add(core: EngineCore, name: str, prompt: list[int], max_tokens: int) -> None:
    from kiln.engine.requests.request import NewRequest
    from kiln.engine.requests.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    core.add(NewRequest(name, prompt, params))


def _turn(
    core: EngineCore, name: str, prompt: list[int], max_tokens: int = 1
) -> tuple[list[int], float, int]:
    """Run a request alone; return its tokens, its milliseconds, and its cached tokens."""
    begun = time.perf_counter()
    _add(core, name, prompt, max_tokens)
    tokens: list[int] = []
    cached = 0
    while core.has_work:
        for output in core.step():
            cached = cached if tokens else output.num_cached_tokens
            tokens += output.token_ids
    return tokens, 1000 * (time.perf_counter() - begun), cached


def _decode(
    core: EngineCore, chance: random.Random, args: argparse.Namespace, again: list[list[int]]
) -> dict[str, Any]:
    """Time steps of decoding rows alone: without copies, and while blocks come from the host.

    The two kinds take turns, because steps take longer as the rows' contexts grow.
    """
    for index in range(args.rows):
        _add(core, f"row-{index}", _text(core, chance, args.context), core.max_model_len)
    while core.scheduler.waiting or core.stats().generated_tokens < args.rows:
        core.step()
    copying, quiet = [], []
    for index, prompt in enumerate(again):
        for _ in range(10):  # what was computed is stored meanwhile
            core.step()
        quiet += [ms for _, (ms, _) in zip(range(args.steps), _steps(core), strict=False)]
        _add(core, f"beside-{index}", prompt, 1)
        for ms, is_copying in _steps(core):
            if is_copying:
                copying.append(ms)
            if f"beside-{index}" not in core.scheduler.requests:
                break
    core.clear()
    quiet_ms = statistics.median(quiet)
    copying_ms = statistics.median(copying) if copying else None  # all loads ended within a step
    return {
        "quiet_step_ms": quiet_ms,
        "copying_step_ms": copying_ms,
        "longer": None if copying_ms is None else copying_ms / quiet_ms - 1,
        "copying_steps": len(copying),
        "copying_each_ms": copying,
        "quiet_each_ms": quiet,
    }


def _steps(core: EngineCore) -> Iterator[tuple[float, bool]]:
    """Yield the milliseconds of each step, and whether only decoding rows ran beside a load."""
    scheduler = core.scheduler
    while True:
        rows, begun = len(scheduler.running), time.perf_counter()
        core.step()
        alone = len(scheduler.running) == rows
        yield 1000 * (time.perf_counter() - begun), alone and scheduler.kv.is_loading


if __name__ == "__main__":
    main()
