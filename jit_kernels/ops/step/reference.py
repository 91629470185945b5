"""The inputs of a step in torch."""

from __future__ import annotations

import math

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.step.message import HEADER, RECORD, RECORD_WORDS, SINGLE

_NO_SETTINGS = (0.0, 1.0, -math.inf, 1.0, 0.0, 0.0)  # greedy, no filter, no penalty
_NO_KEYS = (0, 0, 0, -1)


def words_of(message: torch.Tensor) -> torch.Tensor:
    """Return the records of a message as words, [requests, RECORD_WORDS] int32."""
    requests = int(message[0])
    return message[HEADER : HEADER + requests * RECORD_WORDS].view(requests, RECORD_WORDS)


def fields_of(words: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the single numbers of records, which are first, by name, [requests] int64 each."""
    return dict(zip(SINGLE, words[:, : len(SINGLE)].long().unbind(1), strict=True))


def step_inputs_reference(a: Arguments) -> Results:
    """Return the outputs by name, padding included, and the new tables."""
    requests, tokens = int(a.message[0]), int(a.message[1])
    words = words_of(a.message)
    record = fields_of(words)
    count, first, rows = record["count"], record["first"], record["row"]
    unknown = torch.where(record["num_given"] == 0, a.rejected[rows].long(), 0)
    start = record["start"] - unknown

    owner, offset = _spread(record["num_new"])
    tables = a.tables.clone()
    new = a.message[record["blocks_at"][owner] + offset]
    tables[rows[owner], record["num_blocks"][owner] + offset] = new
    table = tables[rows]

    owner, offset = _spread(count)
    table_row = start[owner] + offset + record["rotary_start"][owner]
    position = start[owner] + offset
    block = table[owner, position // a.block_size].long()
    slot = block * a.block_size + position % a.block_size
    given = offset < record["num_given"][owner]
    token = a.sampled[(record["source"] - unknown)[owner]]
    token[given] = a.message[(record["tokens_at"][owner] + offset)[given]]
    drafted = ~given & (offset > 0)
    token[drafted] = a.drafts[rows[owner][drafted], offset[drafted] - 1]

    length = start + count
    in_use = torch.arange(table.shape[1], device=table.device) < -(-length // a.block_size)[:, None]
    width = a.block_table.shape[1]
    block_table = a.block_table.clone()
    block_table[:requests] = torch.where(in_use, table, block_table[:requests, :width])
    ends = torch.full_like(a.cu_seqlens_q, tokens)
    ends[: requests + 1] = torch.nn.functional.pad(first + count, (1, 0))
    owner, offset = _spread(record["num_samples"])
    sample_row = (first + count - record["num_samples"])[owner] + offset
    keys = _tail(words, "keys", torch.int64)[owner]
    keys[:, 1] += offset - unknown[owner]
    settings = _tail(words, "settings", torch.float32)[owner]
    return {
        "token_ids": _padded(a.token_ids, token, 0),
        "positions": _padded(a.positions, table_row, 0),
        "slot_mapping": _padded(a.slot_mapping, slot, -1),
        "cu_seqlens_q": ends,
        "seq_lens": _padded(a.seq_lens, length, 0),
        "sample_rows": _padded(a.sample_rows, sample_row, 0),
        "settings": _padded(a.settings, settings, _NO_SETTINGS),
        "keys": _padded(a.keys, keys, _NO_KEYS),
        "block_table": block_table,
        "tables": tables,
        "token_pool": a.token_pool.index_put((slot,), token.to(torch.int32)),
        "rejected": a.rejected.index_fill(0, rows, 0),
    }


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
