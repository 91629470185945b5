"""The engines that need no server, on the prompts of the serving benchmark, in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import torch

from kiln.engine.bench.engine import MakeEngine, Tell
from kiln.engine.bench.kiln_engine import KilnEngine
from kiln.engine.bench.report import Row
from kiln.engine.bench.transformers_engine import StaticBatches
from kiln.engine.bench.workload import throughput
from kiln.engine.config import EngineConfig

_TRIAL_TOKENS = 8


def measure(
    config: EngineConfig, prompts: list[list[int]], lengths: list[int], tell: Tell, *, kiln: bool
) -> list[Row]:
    """Return rows of transformers' ``generate``, and of ``LLM.generate`` if ``kiln``.

    transformers runs one request at a time, then batches of ``max_num_seqs``, which is also the
    most that Kiln runs at once. As in the server benchmark, decoding is greedy and each output has
    exactly its length. The number of threads is the fastest for each engine.
    """
    together = config.scheduler.num_rows
    makers: list[MakeEngine] = [partial(StaticBatches, config, size) for size in (1, together)]
    makers += [partial(KilnEngine, config, tell)] if kiln else []
    trial = prompts[:together], [_TRIAL_TOKENS] * len(prompts[:together])
    rows = []
    for make in makers:
        with closing(make()) as engine:
            tell(f"{engine.name}, in process")
            threads = fastest_threads(partial(engine.run, *trial))
            seconds = engine.run(prompts, lengths)
        tokens = sum(map(len, prompts)), sum(lengths)
        numbers = throughput(len(prompts), *tokens, seconds)
        numbers["total_tokens_per_s"] = sum(tokens) / seconds
        rows.append({"engine": f"{engine.name}, in process", "threads": threads, **numbers})
    return rows


def fastest_threads(trial: Callable[[], object]) -> int:
    """Set torch to the number of threads at which a trial is fastest, and return it.

    It tries all cores, all but one, and one. The best depends on the model's size, and a comparison
    must not depend on this choice.
    """
    cores, seconds = len(os.sched_getaffinity(0)), {}
    for threads in sorted({cores, max(1, cores - 1), 1}):
        torch.set_num_threads(threads)
        trial()  # warm-up
        begun = time.perf_counter()
        trial()
        seconds[threads] = time.perf_counter() - begun
    best = min(seconds, key=seconds.__getitem__)
    torch.set_num_threads(best)
    return best
