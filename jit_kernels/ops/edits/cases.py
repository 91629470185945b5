"""The cases on which the logit edits of rows and the ban of words are tested and timed."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.declare.spec import Sizes, Variant

SIZES: list[Sizes] = [
    {"rows": rows, "length": length, "vocab": vocab, "fixed": fixed, "block_size": block_size,
     "blocks": 3}
    for rows, length, vocab, fixed, block_size in [
        (0, 1, 5, 0, 4), (1, 0, 7, 3, 4), (4, 1, 50, 0, 16), (7, 40, 9, 4, 3),
        (5, 700, 300, 40, 16), (2, 1500, 2000, 7, 16),
    ]
]  # fmt: skip
BENCH_SIZES: list[Sizes] = [
    {"rows": rows, "length": length, "vocab": 131072, "fixed": 0, "block_size": 16, "blocks": 32}
    for rows in (1, 16, 256)
    for length in (1024, 8192)
]


def token_edits_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random requests of up to ``length`` tokens; some rows count none."""
    rows, vocab, block_size = sizes["rows"], sizes["vocab"], sizes["block_size"]
    width = -(-max(sizes["length"], 1) // block_size)
    tables = torch.randperm((rows + 1) * width).int().view(rows + 1, width)
    token_pool = torch.randint(0, vocab, (tables.numel() * block_size,), dtype=torch.int32)
    fixed: list[torch.Tensor] = []
    jobs, lengths, first = [], [], 0
    for row in torch.randperm(rows + 1)[:rows].tolist():
        length = sizes["length"]
        if sizes["vocab"] < 131072:  # a test
            length = int(torch.randint(0, length + 1, ())) * int(torch.rand(()) < 0.8)
        count = int(torch.randint(0, min(sizes["fixed"], vocab) + 1, ()))
        prompt = int(torch.randint(0, length + 1, ()))
        counts = length > 0
        jobs.append([row, counts, prompt, first, sum(one.numel() for one in fixed), count])
        lengths.append(length if counts else sizes["length"])
        fixed.append(torch.randperm(vocab)[:count])
        first += count + min(length, vocab)
    made = {
        "spans": torch.zeros(rows, 2, dtype=torch.int32),
        "tokens": torch.zeros(first, dtype=torch.int32),
        "counts": torch.zeros(first, dtype=torch.int32),
        "biases": torch.zeros(first),
        "count_table": torch.zeros(sizes["blocks"], vocab, dtype=torch.int32),
        "jobs": torch.tensor(jobs, dtype=torch.int32).view(rows, 6),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "fixed_tokens": torch.cat([torch.empty(0), *fixed]).int(),
        "fixed_biases": torch.randn(sum(one.numel() for one in fixed)),
        "token_pool": token_pool,
        "tables": tables,
    }
    on_device = {name: tensor.to(device) for name, tensor in made.items()}
    return {**on_device, "block_size": block_size}


BAN_SIZES: list[Sizes] = [
    {"words": words, "rows": rows, "length": length, "vocab": vocab, "block_size": block_size}
    for words, rows, length, vocab, block_size in [
        (0, 1, 3, 5, 4), (1, 1, 1, 33, 4), (40, 3, 30, 64, 3), (300, 5, 60, 1000, 16),
    ]
]  # fmt: skip
BAN_BENCH_SIZES: list[Sizes] = [
    {"words": 4 * rows, "rows": rows, "length": 1024, "vocab": 131072, "block_size": 16}
    for rows in (1, 16, 256)
]


def ban_words_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random requests, and words of which half end what their request ends with."""
    rows, vocab, length = sizes["rows"], sizes["vocab"], sizes["length"]
    width = -(-length // sizes["block_size"])
    tables = torch.randperm((rows + 1) * width).int().view(rows + 1, width)
    token_pool = torch.randint(0, vocab, (tables.numel() * sizes["block_size"],)).int()
    words: list[list[int]] = []
    tokens: list[int] = []
    lengths = torch.randint(0, length + 1, (rows,)) * (torch.rand(rows) < 0.8)
    for _ in range(sizes["words"]):
        mask_row, row = (int(torch.randint(0, most, ())) for most in (rows, rows + 1))
        own = int(lengths[mask_row])
        size = int(torch.randint(1, 6, ()))
        history = token_pool.view(-1, sizes["block_size"])[tables[row].long()].flatten()[:own]
        before = history[max(own - size + 1, 0) :].tolist()
        word = [*before, *torch.randint(0, vocab, (size - len(before),)).tolist()]
        if torch.rand(()) < 0.5:
            word[int(torch.randint(0, size, ()))] = int(torch.randint(0, vocab, ()))
        if own == 0 and size == 2:  # what is in the pool ahead of the request is not its history
            word[0] = int(token_pool[tables[row, 0] * sizes["block_size"] - 1])
        words.append([mask_row, row, len(tokens), size])
        tokens += word
    made = {
        "mask": torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32))).int(),
        "words": torch.tensor(words, dtype=torch.int32).view(-1, 4),
        "lengths": lengths,
        "word_tokens": torch.tensor(tokens, dtype=torch.int32),
        "token_pool": token_pool,
        "tables": tables,
    }
    on_device = {name: tensor.to(device) for name, tensor in made.items()}
    return {**on_device, "block_size": sizes["block_size"]}
