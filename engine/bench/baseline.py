"""The baseline: transformers' ``generate`` on the same prompts, in this process."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from transformers import AutoModelForCausalLM

from kiln.engine.bench.in_process import fastest_threads
from kiln.engine.bench.report import Row
from kiln.engine.bench.serving import throughput
from kiln.engine.bench.transformers_generate import generate
from kiln.engine.config import DType
from kiln.engine.runner.device import resolve_device, resolve_dtype


def measure(
    folder: Path,
    prompts: list[list[int]],
    output_tokens: int,
    dtype: DType | None,
    device: str | None,
    batch_size: int,
) -> list[Row]:
    """Return two rows: one request at a time, and static batches of ``batch_size``.

    As in the server benchmark, decoding is greedy and each output has exactly ``output_tokens``
    tokens. Device and dtype are those that Kiln would choose; the number of threads is the fastest.
    """
    place = resolve_device(device or "auto")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    model = model.to(place, resolve_dtype(dtype or "auto", model.dtype, place)).eval()
    rows = []
    for name, size in (
        ("transformers generate, one at a time", 1),
        (f"transformers generate, batches of {batch_size}", batch_size),
    ):
        threads = fastest_threads(partial(generate, model, prompts[:size], 8))
        begun = time.perf_counter()
        made = 0
        for start in range(0, len(prompts), size):
            made += generate(model, prompts[start : start + size], output_tokens)
            print(f"  {name}: {start + size}/{len(prompts)}", file=sys.stderr, flush=True)
        seconds = time.perf_counter() - begun
        numbers = throughput(len(prompts), sum(map(len, prompts)), made, seconds)
        ran_in = str(model.dtype).removeprefix("torch.")
        rows.append({"name": name, "threads": threads, "dtype": ran_in, **numbers})
    return rows
