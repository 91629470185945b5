"""Kiln's engine on the same prompts in this process, without HTTP."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kiln.engine.bench.report import Row
from kiln.engine.bench.serving import throughput
from kiln.engine.config import DType
from kiln.engine.llm import LLM
from kiln.engine.requests.sampling_params import SamplingParams

_TRIAL_TOKENS = 8


def measure(
    folder: Path,
    prompts: list[list[int]],
    output_tokens: int,
    dtype: DType | None,
    device: str | None,
    concurrency: int,
) -> Row:
    """Return one row: ``LLM.generate`` with ``concurrency`` requests running at once."""
    llm = LLM(str(folder), dtype=dtype or "auto", device=device or "auto", max_num_seqs=concurrency)

    def run(count: int, length: int) -> int:
        params = SamplingParams(
            temperature=0, max_tokens=length, min_tokens=length, ignore_eos=True
        )
        answers = llm.generate(prompts[:count], params)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    threads = fastest_threads(lambda: run(concurrency, _TRIAL_TOKENS))
    begun = time.perf_counter()
    made = run(len(prompts), output_tokens)
    seconds = time.perf_counter() - begun
    numbers = throughput(len(prompts), sum(map(len, prompts)), made, seconds)
    name = f"kiln LLM.generate in process, {concurrency} at once"
    return {"name": name, "threads": threads, **numbers}


def fastest_threads(trial: Callable[[], object]) -> int:
    """Set torch to the number of threads at which a trial is fastest, and return it.

    It tries all cores, all but one, and one. The best depends on the model's size, and a comparison
    must not depend on this choice.
    """
    cores = len(os.sched_getaffinity(0))
    best, best_seconds = cores, float("inf")
    for threads in sorted({cores, max(1, cores - 1), 1}):
        torch.set_num_threads(threads)
        trial()  # warm-up
        begun = time.perf_counter()
        trial()
        seconds = time.perf_counter() - begun
        if seconds < best_seconds:
            best, best_seconds = threads, seconds
    torch.set_num_threads(best)
    return best
