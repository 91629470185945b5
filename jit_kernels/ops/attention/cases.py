"""Random calls of paged attention, with NaN in all memory that must not be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from kiln.jit_kernels.ops.attention.variants import KV_BLOCK

FAR = 2**30  # a block id outside every pool
Ragged = Sequence[tuple[int, int]]  # (tokens in the pool, query tokens) of each request
_DEFAULTS = MappingProxyType(
    {"window": 0, "cap": 0, "sinks": 0, "by_token": 0, "steep": 1, "far": 0, "shared": 0}
)


def lengths_of(requests: Ragged, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return seq_lens and cu_seqlens_q of requests."""
    lengths = torch.tensor([length for length, _ in requests], dtype=torch.int32)
    starts = torch.tensor([0, *(tokens for _, tokens in requests)]).cumsum(0).to(torch.int32)
    return lengths.to(device), starts.to(device)


def make_case(
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    device: str,
    *,
    requests: Ragged,
) -> SimpleNamespace:
    """Return the arguments of a random call of paged_attention by name, without out and lse.

    Past a request's end, block tables hold ids of no block. ``sizes``: kv_heads, group; if not 0,
    window (-c: chunks of c keys), cap, sinks, by_token (a pool laid out by token, not by head) and
    far (see ``far_greatest``); shared, tokens that all requests have in common, in whole blocks
    that their last token is not in; steep, a factor of the logits.
    """
    sizes = {**_DEFAULTS, **sizes}
    kv_heads, heads = sizes["kv_heads"], sizes["kv_heads"] * sizes["group"]
    counts = [-(-length // KV_BLOCK) for length, _ in requests]
    table, spare = random_table(counts, sizes["shared"] // KV_BLOCK)
    pool = torch.randn(sum(counts) + 3, 2, kv_heads, KV_BLOCK, head_dim, device=device, dtype=dtype)
    _poison(pool, table, counts, [length for length, _ in requests], spare)
    if sizes["by_token"]:
        pool = pool.transpose(2, 3).contiguous().transpose(2, 3)
    pool = pool.to(kv_dtype)
    lengths, starts = lengths_of(requests, device)
    query = torch.randn(int(starts[-1]), heads + 1, head_dim).to(dtype)[:, :heads]
    sinks = torch.randn(heads).mul_(2) if sizes["sinks"] else None
    case = SimpleNamespace(
        query=query.to(device),
        key_pool=pool[:, 0],
        value_pool=pool[:, 1],
        block_table=table.to(device),
        seq_lens=lengths,
        cu_seqlens_q=starts,
        sinks=None if sinks is None else sinks.to(device),
        scale=head_dim**-0.5 * sizes["steep"],
        window=sizes["window"],
        soft_cap=float(sizes["cap"]),
        k_scale=0.75,
        v_scale=1.5,
    )
    return far_greatest(case) if sizes["far"] else case


def changed(case: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    """Return a copy of a call with some arguments replaced."""
    return SimpleNamespace(**{**vars(case), **changes})


def far_greatest(case: SimpleNamespace) -> SimpleNamespace:
    """Return a call in which each request's first key has the logit 14.8, and all others have 0.

    That key's values are 0, all others 1. So the output is a sum of weights of about 2**-21, of
    which fp16 keeps three bits.
    """
    held = case.block_table[case.seq_lens > 0, 0].long()
    steep = 14.8 / (case.k_scale * case.scale * case.query.shape[2])
    pools = []
    for pool, others, value in ((case.key_pool, 0.0, steep), (case.value_pool, 1.0, 0.0)):
        wide = pool.float()
        wide[wide.isfinite()] = others
        wide[held, :, 0] = value
        pools.append(wide.to(pool.dtype))
    query = torch.ones_like(case.query)
    return changed(case, query=query, key_pool=pools[0], value_pool=pools[1])


def random_table(counts: Sequence[int], shared: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table [num_requests, max_blocks] int32, and the blocks that no request uses.

    All requests have the first ``shared`` blocks in common, but for each one's last.
    """
    order = torch.randperm(sum(counts) + 3).to(torch.int32)
    table = torch.full((len(counts), max(counts, default=0) + 2), FAR, dtype=torch.int32)
    at = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = order[at : at + count]
        at += count
    for row, count in zip(table[1:], counts[1:], strict=True) if shared else ():
        common = min(shared, count - 1, counts[0] - 1)
        if common > 0:
            row[:common] = table[0, :common]
    used = torch.zeros(len(order), dtype=torch.bool)
    used[table[table != FAR].long()] = True
    return table, order[~used[order.long()]]


def _poison(
    pool: torch.Tensor,
    table: torch.Tensor,
    counts: Sequence[int],
    lengths: Sequence[int],
    spare: torch.Tensor,
) -> None:
    """Write NaN where no request has a token. pool: [num_blocks, 2, kv_heads, 16, head_dim]."""
    pool[spare.long().to(pool.device)] = float("nan")
    for row, count, length in zip(table.tolist(), counts, lengths, strict=True):
        if length % KV_BLOCK:
            pool[row[count - 1], :, :, length % KV_BLOCK :] = float("nan")
