"""What Kiln's engine does with the same prompts in this process, without HTTP in between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kiln.engine.config import DType
from kiln.engine.llm import LLM
from kiln.engine.sampling_params import SamplingParams

_TRIAL_TOKENS = 8


def measure(
    folder: Path,
    prompts: list[list[int]],
    output_tokens: int,
    dtype: DType | None,
    device: str | None,
    concurrency: int,
) -> dict[str, Any]:
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
    return {
        "name": f"kiln LLM.generate in process, {concurrency} at once",
        "threads": threads,
        "requests": len(prompts),
        "seconds": seconds,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": made,
        "output_tokens_per_s": made / seconds,
        "requests_per_s": len(prompts) / seconds,
    }


def fastest_threads(trial: Callable[[], object]) -> int:
    """Set torch to the number of threads at which a trial is fastest, and return it.

    All cores, or all but one: which is better depends on the model's size, and a comparison must
    not hang on it.
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
