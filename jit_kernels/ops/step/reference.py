"""The inputs of a step in torch."""

from __future__ import annotations

import math

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.step.message import HEADER, RECORD, RECORD_WORDS, SINGLE

_NO_SETTINGS = (0.0, 1.0, -math.inf, 1.0, 0.0, 0.0)  # greedy, no filter, no penalty
_NO_KEYS = (0, 0, 0, -1)


def step_inputs_reference(a: Arguments) -> Results:
    """Return the outputs by name, padding included, and the new tables."""
    requests, tokens = int(a.message[0]), int(a.message[1])
    words = a.message[HEADER : HEADER + requests * RECORD_WORDS].view(requests, RECORD_WORDS)
    record = {name: words[:, _column(name)].long() for name in SINGLE}
    start, count, first = record["start"], record["count"], record["first"]

    owner, offset = _spread(record["num_new"])
    tables = a.tables.clone()
    new = a.message[record["blocks_at"][owner] + offset]
    tables[record["row"][owner], record["num_blocks"][owner] + offset] = new
    table = tables[record["row"]]

    owner, offset = _spread(count)
    position = start[owner] + offset
    block = table[owner, position // a.block_size].long()
    listed = record["tokens_at"][owner] >= 0
    place = torch.where(listed, record["tokens_at"][owner] + offset, 0)
    token = torch.where(listed, a.message[place], a.sampled[record["source"][owner]])

    length = start + count
    in_use = torch.arange(table.shape[1], device=table.device) < -(-length // a.block_size)[:, None]
    width = a.block_table.shape[1]
    block_table = a.block_table.clone()
    block_table[:requests] = torch.where(in_use, table, block_table[:requests, :width])
    ends = torch.full_like(a.cu_seqlens_q, tokens)
    ends[: requests + 1] = torch.nn.functional.pad(first + count, (1, 0))
    has_sample = record["sample"] >= 0
    sampling = words[has_sample]
    slot = block * a.block_size + position % a.block_size
    return {
        "token_ids": _padded(a.token_ids, token, 0),
        "positions": _padded(a.positions, position, 0),
        "slot_mapping": _padded(a.slot_mapping, slot, -1),
        "cu_seqlens_q": ends,
        "seq_lens": _padded(a.seq_lens, length, 0),
        "sample_rows": _padded(a.sample_rows, (first + count - 1)[has_sample], 0),
        "settings": _padded(a.settings, _tail(sampling, "settings", torch.float32), _NO_SETTINGS),
        "keys": _padded(a.keys, _tail(sampling, "keys", torch.int64), _NO_KEYS),
        "block_table": block_table,
        "tables": tables,
        "token_pool": a.token_pool.index_put((slot,), token.to(torch.int32)),
    }


def _column(name: str) -> int:
    return int(RECORD.fields[name][1]) // 4  # type: ignore[index]


def _tail(words: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a field that holds several numbers per record, [records, numbers]."""
    kind, at = RECORD.fields[name][:2]  # type: ignore[index]
    part = words[:, at // 4 : (at + kind.itemsize) // 4]
    return part.contiguous().view(dtype)


def _spread(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each element of ragged lists, its list and its place in the list."""
    lists = torch.arange(len(counts), device=counts.device)
    owner = lists.repeat_interleave(counts)
    firsts = counts.cumsum(0) - counts
    return owner, torch.arange(len(owner), device=counts.device) - firsts[owner]


def _padded(
    like: torch.Tensor, values: torch.Tensor, padding: float | tuple[float, ...]
) -> torch.Tensor:
    """Return ``values``, then rows of ``padding``, with the shape and dtype of ``like``."""
    result = torch.empty_like(like)
    result[: len(values)] = values.to(like.dtype)
    if len(values) < len(like):
        result[len(values) :] = torch.tensor(padding, dtype=like.dtype, device=like.device)
    return result
