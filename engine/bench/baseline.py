"""The baseline: transformers' ``generate`` on the same prompts, in this process."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kiln.engine.bench.offline import fastest_threads
from kiln.engine.bench.report import Row
from kiln.engine.bench.serving import throughput
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
        threads = fastest_threads(partial(_generate, model, prompts[:size], 8))
        begun = time.perf_counter()
        made = 0
        for start in range(0, len(prompts), size):
            made += _generate(model, prompts[start : start + size], output_tokens)
            print(f"  {name}: {start + size}/{len(prompts)}", file=sys.stderr, flush=True)
        seconds = time.perf_counter() - begun
        numbers = throughput(len(prompts), sum(map(len, prompts)), made, seconds)
        ran_in = str(model.dtype).removeprefix("torch.")
        rows.append({"name": name, "threads": threads, "dtype": ran_in, **numbers})
    return rows


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], output_tokens: int) -> int:
    """Run one batch, padded on the left, and return how many tokens it generated."""
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    made = model.generate(
        input_ids=torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=output_tokens,
        min_new_tokens=output_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=0,
    )
    return int((made.shape[1] - longest) * made.shape[0])
