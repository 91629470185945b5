"""The cases on which the inputs of a step are tested and timed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from kiln.jit_kernels.declare.spec import Sizes, Variant
from kiln.jit_kernels.ops.step.message import begin_message, message_words

_SAMPLED = 1000  # token ids
_MOST_DRAFTS = 3


def _case(requests: int, tokens: int, context: int, block_size: int = 16, pad: int = 0) -> Sizes:
    """Return a case; ``tokens``, ``context``: maxima per request; ``pad``: padding requests."""
    return {
        "requests": requests, "tokens": tokens, "context": context, "block_size": block_size,
        "pad": pad,
    }  # fmt: skip


SIZES = [
    _case(0, 1, 0), _case(3, 1, 0, pad=3), _case(1, 1, 0), _case(8, 1, 40, pad=7),
    _case(8, 1, 100, pad=3), _case(5, 300, 0, pad=2), _case(5, 9, 70, 3, pad=1),
    _case(40, 1, 90, 5), _case(2, 1, 2300, 16), _case(90, 5, 60, 4, pad=5),
]  # fmt: skip
BENCH_SIZES = [
    *(_case(requests, 1, context) for requests in (1, 64, 256) for context in (1024, 8192)),
    _case(1, 2048, 0),
]


def step_inputs_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return a random step of decodes, drafts and chunks of prompts."""
    block_size, pad = sizes["block_size"], sizes["pad"]
    requests, most = sizes["requests"] - pad, _most_drafts(sizes)
    chance = np.random.default_rng(int(torch.randint(2**31, ())))
    counts = chance.integers(1, sizes["tokens"] + 1, requests, dtype=np.int32)
    starts = chance.integers(0, sizes["context"] + 1, requests, dtype=np.int32)
    width = -(-(sizes["context"] + sizes["tokens"]) // block_size)
    rows = requests + 2
    blocks_of = chance.permutation(rows * width).astype(np.int32).reshape(rows, width)
    tables = blocks_of.copy()
    total = int(counts.sum())
    samples = (chance.random(requests) < 0.7) * chance.integers(1, np.minimum(counts, most + 1) + 1)
    rejected = chance.integers(0, most + 1, rows, dtype=np.int32)

    message = np.full(message_words(requests, total + rows * width), -7, np.int32)
    records = begin_message(message, counts, samples)
    records["row"], records["start"] = chance.permutation(rows)[:requests], starts
    at = message_words(requests, 0)
    for index, (start, count) in enumerate(zip(starts, counts, strict=True)):
        known = count if count > most + 1 else chance.choice([0, 1, count])
        unknown = rejected[records["row"][index]] * (known == 0)
        records["start"][index] = start + unknown  # so that it begins at ``start``
        records["tokens_at"][index], records["num_given"][index] = at, known
        records["source"][index] = unknown + chance.integers(rows)
        message[at : at + known] = chance.integers(0, _SAMPLED, known)
        at += known
        blocks = -(-(start + count) // block_size)
        new = chance.integers(0, blocks + 1) if start else blocks
        records["blocks_at"][index] = at
        records["num_blocks"][index], records["num_new"][index] = blocks - new, new
        row = records["row"][index]
        message[at : at + new] = blocks_of[row, blocks - new : blocks]
        tables[row, blocks - new : blocks] = 0
        at += new
    records["rotary_start"] = chance.choice([0, 4096], requests)
    records["settings"] = chance.random((requests, 6))
    records["settings"][::3, 2] = -math.inf
    records["keys"] = chance.integers(-(2**62), 2**62, (requests, 4))

    arrays = {
        "message": message[:at],
        "tables": tables,
        "sampled": chance.integers(0, _SAMPLED, rows + most, dtype=np.int32),
        "drafts": chance.integers(0, _SAMPLED, (rows, most), dtype=np.int32),
        "rejected": rejected,
    }
    made = _outputs(total + pad, requests + pad, int(samples.sum()) + pad, width)
    made["token_pool"] = torch.full((rows * width * block_size,), -5, dtype=torch.int32)
    on_device = {name: tensor.to(device) for name, tensor in made.items()}
    return {**on_device, **_on_device(device, **arrays), "block_size": block_size}


def _outputs(tokens: int, requests: int, samples: int, width: int) -> dict[str, torch.Tensor]:
    return {
        "token_ids": torch.zeros(tokens, dtype=torch.int64),
        "positions": torch.zeros(tokens, dtype=torch.int64),
        "slot_mapping": torch.zeros(tokens, dtype=torch.int64),
        "cu_seqlens_q": torch.zeros(requests + 1, dtype=torch.int32),
        "seq_lens": torch.zeros(requests, dtype=torch.int32),
        "sample_rows": torch.zeros(samples, dtype=torch.int64),
        "settings": torch.zeros(samples, 6),
        "keys": torch.zeros(samples, 4, dtype=torch.int64),
        "block_table": torch.full((requests, width), -9, dtype=torch.int32),
    }


def _on_device(device: str, **arrays: np.ndarray) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def moved_bytes(sizes: Sizes) -> int:
    """Return the maximum number of bytes that a step of these sizes moves."""
    requests, pad, drafts = sizes["requests"] - sizes["pad"], sizes["pad"], _most_drafts(sizes)
    tokens = requests * sizes["tokens"]
    blocks = requests * -(-(sizes["context"] + sizes["tokens"]) // sizes["block_size"])
    message = 4 * message_words(requests, tokens + blocks)
    rows = 4 * (requests + 2) * (3 + drafts) + 4 * drafts + 8 * (requests + pad) + 4
    rows += 64 * (requests * (drafts + 1) + pad)
    return message + rows + 28 * (tokens + pad) + 8 * blocks


def _most_drafts(sizes: Sizes) -> int:
    """Return the drafts that a row has room for."""
    return min(sizes["tokens"] - 1, _MOST_DRAFTS)
