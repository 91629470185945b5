"""Paged attention request by request in torch: the oracle of every attention kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, slots=True)
class Paged:
    """One call of paged attention. Shapes as in ``ops.attention_decode.paged_attention``."""

    query: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    sinks: torch.Tensor | None
    scale: float
    window: int
    soft_cap: float
    k_scale: float
    v_scale: float


@dataclass(frozen=True, slots=True)
class Attended:
    """One request's result, in float32 or float64; bound: sum (p + step) |v|, as large as out."""

    first_token: int
    num_tokens: int
    out: torch.Tensor  # [num_tokens, num_heads, head_dim]
    lse: torch.Tensor  # [num_tokens, num_heads]
    bound: torch.Tensor


def attend(call: Paged, serves: Callable[[int], bool], step: float = 0.0) -> list[Attended]:
    """Return the results of the requests whose number of query tokens ``serves`` accepts.

    Computed in float64 where the query is, else in float32. ``step``: what the bound counts of
    every weight, however small. Nothing at or past a request's length is read, neither of the pool
    nor of the block table.
    """
    starts, lengths = call.cu_seqlens_q.tolist(), call.seq_lens.tolist()
    done = []
    for request, (first, last) in enumerate(pairwise(starts)):
        if last > first and serves(last - first):
            done.append(_attend_one(call, request, first, last, lengths[request], step))
    return done


def scattered(
    done: list[Attended], out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of out and lse, in which the rows of some requests have their results."""
    out, lse = out.clone(), lse.clone()
    for one in done:
        rows = slice(one.first_token, one.first_token + one.num_tokens)
        out[rows] = one.out.to(out.dtype)
        if lse.numel():
            lse[rows] = one.lse.to(lse.dtype)
    return out, lse


def _attend_one(
    call: Paged, request: int, first: int, last: int, length: int, step: float
) -> Attended:
    """Return the result of the tokens first .. last - 1, the newest of ``length``."""
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    query = call.query[first:last].to(dtype)  # [tokens, heads, dim]
    keys = _gather(call.key_pool, call.block_table[request], length).to(dtype) * call.k_scale
    values = _gather(call.value_pool, call.block_table[request], length).to(dtype) * call.v_scale
    tokens, heads = query.shape[:2]
    groups = query.unflatten(1, (keys.shape[0], heads // keys.shape[0]))
    logits = torch.einsum("thgd,hld->thgl", groups, keys).reshape(tokens, heads, length)
    logits *= call.scale
    if call.soft_cap > 0:
        logits = call.soft_cap * torch.tanh(logits / call.soft_cap)
    ends = torch.arange(length - tokens + 1, length + 1, device=query.device)[:, None, None]
    position = torch.arange(length, device=query.device)
    hidden = position >= ends
    if call.window:
        hidden |= position < ends - call.window
    logits = logits.masked_fill(hidden, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.to(dtype).expand(tokens, heads).unsqueeze(-1)
        logits = torch.cat((logits, sinks), dim=-1)
    lse = torch.logsumexp(logits, dim=-1) if logits.shape[-1] else logits.new_full(
        (tokens, heads), float("-inf")
    )  # fmt: skip
    least = torch.where(lse.isneginf(), 0.0, lse)  # -inf - -inf would be NaN
    weights = (logits[..., :length] - least.unsqueeze(-1)).exp()
    weights = weights.unflatten(1, groups.shape[1:3])
    out = torch.einsum("thgl,hld->thgd", weights, values)
    seen = (~hidden).to(dtype).unsqueeze(2)
    bound = torch.einsum("thgl,hld->thgd", weights + step * seen, values.abs())
    return Attended(first, tokens, out.flatten(1, 2), lse, bound.flatten(1, 2))


def _gather(pool: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return a request's keys or values [num_kv_heads, length, head_dim]."""
    heads, block, dim = pool.shape[1:]
    ids = table[: -(-length // block)].long()
    if not ids.numel():
        return pool.new_empty((heads, 0, dim))
    taken = pool[ids] if pool.dtype != torch.float8_e4m3fn else pool.view(torch.uint8)[ids].view(
        pool.dtype
    )  # fmt: skip
    return taken.transpose(0, 1).reshape(heads, -1, dim)[:, :length]
