"""The cases on which proposing and verifying drafts is tested and timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kiln.jit_kernels.declare.spec import Sizes, Variant
from kiln.jit_kernels.ops.step.message import WANTED, begin_message, message_words

_SAMPLED = 1000  # token ids
_POISON = -9  # what a kernel must leave alone

VERIFY_SIZES: list[Sizes] = [
    {"requests": requests, "samples": samples} for requests, samples in
    [(0, 1), (1, 1), (1, 2), (5, 4), (300, 16)]
]  # fmt: skip
VERIFY_BENCH_SIZES: list[Sizes] = [{"requests": requests, "samples": 4} for requests in (1, 256)]


def verify_chain_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return a step of three quarters of the rows, with up to ``samples`` samples each."""
    chance = _chance()
    requests = sizes["requests"] - sizes["requests"] // 4
    samples = chance.integers(0, sizes["samples"] + 1, requests)
    counts = np.maximum(samples + chance.integers(0, 3, requests), 1)
    message = np.full(message_words(requests, 0), -7, np.int32)
    records = begin_message(message, counts, samples)
    records["row"] = chance.permutation(sizes["requests"])[:requests]
    tokens = chance.integers(0, _SAMPLED, int(counts.sum()))
    sampled = chance.integers(0, _SAMPLED, int(samples.sum()) + 1, dtype=np.int32)
    for own in records:
        drafts = own["num_samples"] - 1
        agree = int(chance.integers(0, max(drafts, 0) + 1))
        place = own["first"] + own["count"] - drafts
        sampled[own["sample"] : own["sample"] + agree] = tokens[place : place + agree]
        if drafts > 0 and chance.random() < 0.3:  # a later draft that agrees does not stand
            sampled[own["sample"] + drafts - 1] = tokens[place + drafts - 1]
    rejected = np.full(sizes["requests"], _POISON, np.int32)
    return _on_device(device, rejected=rejected, message=message, token_ids=tokens, sampled=sampled)


def verified_bytes(sizes: Sizes) -> int:
    """Return the maximum number of bytes that verifying the drafts of a step moves."""
    requests, samples = sizes["requests"], sizes["samples"]
    return 4 * message_words(requests, 0) + requests * (8 + 12 * samples + 16) + 4


def _case(
    requests: int,
    length: int,
    vocab: int,
    drafts: int = 3,
    longest: int = 4,
    shortest: int = 2,
    block_size: int = 16,
    pad: int = 0,
) -> Sizes:
    """Return a case; ``length``: maximum of a request; ``pad``: padding requests."""
    return {
        "requests": requests, "length": length, "vocab": vocab, "drafts": drafts,
        "longest": longest, "shortest": shortest, "block_size": block_size, "pad": pad,
    }  # fmt: skip


NGRAM_SIZES = [
    _case(3, 9, 2, pad=3), _case(1, 2, 1, shortest=1), _case(4, 30, 2, drafts=0),
    _case(40, 12, 2, drafts=5, longest=3, shortest=1, block_size=4, pad=7),
    _case(30, 90, 3, drafts=15, longest=31, shortest=1, block_size=3, pad=1),
    _case(12, 200, 262144, longest=8, shortest=8, block_size=5),
    _case(12, 700, 2**31 - 1, longest=5, shortest=3, pad=2),
    _case(3, 12000, 40, drafts=2, longest=5),
]  # fmt: skip
NGRAM_BENCH_SIZES = [
    *(_case(requests, 2048, 131072) for requests in (1, 64, 256)),
    *(_case(requests, 131072, 131072) for requests in (1, 64)),
]


def propose_ngram_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random requests, of which most end with tokens that they have had before."""
    chance, most = _chance(), sizes["drafts"]
    requests = sizes["requests"] - sizes["pad"]
    test = sizes["vocab"] != 131072
    shortest = 2 if test else sizes["length"]
    histories = []
    for length in chance.integers(shortest, sizes["length"] + 1, requests):
        tokens = chance.integers(0, sizes["vocab"], length, dtype=np.int32)
        for _ in range(chance.integers(0, 4) if test else 0):
            size = min(int(chance.integers(1, sizes["longest"] + 2)), length - 1)
            at = int(chance.integers(0, length - size))
            tokens[at : at + size] = tokens[length - size :]
        histories.append(tokens)
    samples = chance.integers(0 if test else 1, most + 2, requests)
    wanted = chance.integers(0 if test else most, most + 1, requests)
    return {
        **ngram_step(
            histories, samples, chance.integers(0, np.maximum(samples, 1)), wanted, most=most,
            pad=sizes["pad"], block_size=sizes["block_size"], device=device,
        ),
        "prompt_lookup_max": sizes["longest"], "prompt_lookup_min": sizes["shortest"],
    }  # fmt: skip


def ngram_step(
    histories: Sequence[np.ndarray],
    samples: np.ndarray,
    rejected: np.ndarray,
    wanted: np.ndarray,
    *,
    most: int,
    block_size: int,
    pad: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return the tensors of a step that has sampled the last token of each history.

    ``samples``, ``rejected``, ``wanted`` [requests]: of each request; ``most``: drafts of a row.
    What is behind a history in its blocks, rejected drafts included, may be any token of it.
    """
    chance, requests = _chance(), len(histories)
    rows = requests + pad + 2
    width = -(-max([len(tokens) + most for tokens in histories], default=1) // block_size)
    tables = chance.permutation(rows * width).astype(np.int32).reshape(rows, width)
    token_pool = np.zeros((rows * width, block_size), np.int32)
    sampled = chance.integers(0, _SAMPLED, int(samples.sum()) + 1, dtype=np.int32)
    message = np.full(message_words(requests, requests), -7, np.int32)
    records = begin_message(message, np.maximum(samples, 1), samples)
    records["row"] = own_rows = chance.permutation(rows)[:requests]
    if most:
        message[WANTED] = message_words(requests, 0)
        message[message[WANTED] :] = wanted
    rejected_by_row = np.full(rows, _POISON, np.int32)
    rejected_by_row[own_rows] = rejected
    seq_lens = np.zeros(requests + pad, np.int32)
    for index, tokens in enumerate(histories):
        seq_lens[index] = len(tokens) - 1 + rejected[index]
        laid_out = chance.choice(tokens, width * block_size)
        laid_out[: len(tokens) - 1] = tokens[:-1]
        token_pool[tables[own_rows[index]]] = laid_out.reshape(width, block_size)
        if samples[index]:
            sampled[records["sample"][index] + samples[index] - 1 - rejected[index]] = tokens[-1]
    tensors = _on_device(
        device,
        drafts=np.full((rows, most), _POISON, np.int32),
        num_drafts=np.full(rows, _POISON, np.int32),
        message=message, seq_lens=seq_lens, rejected=rejected_by_row, sampled=sampled,
        token_pool=token_pool.reshape(-1), tables=tables,
    )  # fmt: skip
    return {**tensors, "block_size": block_size}


def looked_up_bytes(sizes: Sizes) -> int:
    """Return the maximum number of bytes that proposing the drafts of a step moves."""
    requests, most = sizes["requests"], sizes["drafts"]
    rows = (requests + 2) * (2 * most + 3) + requests * (1 + most + 1) + 1
    histories = requests * (sizes["length"] + -(-sizes["length"] // sizes["block_size"]))
    return 4 * (message_words(requests, requests) + rows + histories)


def _chance() -> np.random.Generator:
    return np.random.default_rng(int(torch.randint(2**31, ())))


def _on_device(device: str, **arrays: np.ndarray) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
