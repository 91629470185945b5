"""The cases on which the inputs of a step are tested and timed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from kiln.jit_kernels.declare.spec import Sizes, Variant
from kiln.jit_kernels.ops.step.message import begin_message, message_words

_SAMPLED = 1000  # token ids


def _case(requests: int, tokens: int, context: int, block_size: int = 16, pad: int = 0) -> Sizes:
    """Return a case; ``tokens``, ``context``: maxima per request; ``pad``: padding requests."""
    return {
        "requests": requests, "tokens": tokens, "context": context, "block_size": block_size,
        "pad": pad,
    }  # fmt: skip


SIZES = [
    _case(0, 1, 0), _case(3, 1, 0, pad=3), _case(1, 1, 0), _case(8, 1, 40, pad=7),
    _case(8, 1, 100, pad=3), _case(5, 300, 0, pad=2), _case(5, 9, 70, 3, pad=1),
    _case(40, 1, 90, 5), _case(2, 1, 2300, 16),
]  # fmt: skip
BENCH_SIZES = [
    *(_case(requests, 1, context) for requests in (1, 64, 256) for context in (1024, 8192)),
    _case(1, 2048, 0),
]


def step_inputs_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return a random step of decodes and prefill chunks; some of the chunks sample."""
    block_size, pad = sizes["block_size"], sizes["pad"]
    requests = sizes["requests"] - pad
    chance = np.random.default_rng(int(torch.randint(2**31, ())))
    counts = chance.integers(1, sizes["tokens"] + 1, requests, dtype=np.int32)
    starts = chance.integers(0, sizes["context"] + 1, requests, dtype=np.int32)
    width = -(-(sizes["context"] + sizes["tokens"]) // block_size)
    rows = requests + 2
    pool = chance.permutation(rows * width).astype(np.int32)
    total, samples = int(counts.sum()), chance.random(requests) < 0.7

    message = np.full(message_words(requests, total + rows * width), -7, np.int32)
    records = begin_message(message, counts, samples)
    records["row"], records["start"] = chance.permutation(rows)[:requests], starts
    at = message_words(requests, 0)
    for index, (start, count) in enumerate(zip(starts, counts, strict=True)):
        known = count > 1 or chance.random() < 0.3
        records["tokens_at"][index] = at if known else -1
        records["source"][index] = chance.integers(rows)
        if known:
            message[at : at + count] = chance.integers(0, _SAMPLED, count)
            at += count
        blocks = -(-(start + count) // block_size)
        new = chance.integers(0, blocks + 1) if start else blocks
        records["blocks_at"][index] = at
        records["num_blocks"][index], records["num_new"][index] = blocks - new, new
        message[at : at + new] = pool[index * width : index * width + new]
        at += new
    records["settings"] = chance.random((requests, 6))
    records["settings"][::3, 2] = -math.inf
    records["keys"] = chance.integers(-(2**62), 2**62, (requests, 4))
    tables = pool[::-1].reshape(rows, width).copy()
    sampled = chance.integers(0, _SAMPLED, rows, dtype=np.int32)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    def room(count: int, *more: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, *more, dtype=dtype, device=device)

    num_samples = int(samples.sum())
    return {
        "token_ids": room(total + pad, dtype=torch.int64),
        "positions": room(total + pad, dtype=torch.int64),
        "slot_mapping": room(total + pad, dtype=torch.int64),
        "cu_seqlens_q": room(requests + pad + 1, dtype=torch.int32),
        "seq_lens": room(requests + pad, dtype=torch.int32),
        "sample_rows": room(num_samples + pad, dtype=torch.int64),
        "settings": room(num_samples + pad, 6, dtype=torch.float32),
        "keys": room(num_samples + pad, 4, dtype=torch.int64),
        "block_table": room(requests + pad, width, dtype=torch.int32) - 9,
        "tables": on_device(tables),
        "token_pool": room(rows * width * block_size, dtype=torch.int32) - 5,
        "message": on_device(message[:at]),
        "sampled": on_device(sampled),
        "block_size": block_size,
    }


def moved_bytes(sizes: Sizes) -> int:
    """Return the maximum number of bytes that a step of these sizes moves."""
    requests, pad = sizes["requests"] - sizes["pad"], sizes["pad"]
    tokens = requests * sizes["tokens"]
    blocks = requests * -(-(sizes["context"] + sizes["tokens"]) // sizes["block_size"])
    message = 4 * message_words(requests, tokens + blocks)
    rows = 4 * (requests + 2) + 8 * (requests + pad) + 4 + 64 * (requests + pad)
    return message + rows + 28 * (tokens + pad) + 8 * blocks
