"""Paged attention in torch, one request at a time: the test oracle of every attention kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.attention.visible import first_visible


@dataclass(frozen=True, slots=True)
class Attended:
    """One request's result in float32 or float64; bound: sum (p + step) |v|, shaped like out."""

    first_token: int
    num_tokens: int
    out: torch.Tensor  # [num_tokens, num_heads, head_dim]
    lse: torch.Tensor  # [num_tokens, num_heads]
    bound: torch.Tensor

    @property
    def rows(self) -> slice:
        """The request's rows of out and lse."""
        return slice(self.first_token, self.first_token + self.num_tokens)


def attend(
    a: Arguments, serves: Callable[[int], bool], step: float = 0.0, *, wide: bool = False
) -> list[Attended]:
    """Return the results of the requests whose number of query tokens ``serves`` accepts.

    Arguments as in paged_attention. The results are float64 if the query is or with ``wide``, else
    float32. ``step``: added to each weight in the bound. Neither the pool nor the block table is
    read at or past a request's length.
    """
    dtype = torch.float64 if wide or a.query.dtype == torch.float64 else torch.float32
    ends = enumerate(pairwise(a.cu_seqlens_q.tolist()))
    return [
        _attend_one(a, request, slice(*bounds), step, dtype)
        for request, bounds in ends
        if bounds[1] > bounds[0] and serves(bounds[1] - bounds[0])
    ]


def scattered(a: Arguments, serves: Callable[[int], bool]) -> Results:
    """Return the new out and lse; rows of requests that are not served are unchanged."""
    out, lse = a.out.clone(), a.lse.clone()
    for one in attend(a, serves):
        out[one.rows] = one.out.to(out.dtype)
        if lse.numel():
            lse[one.rows] = one.lse.to(lse.dtype)
    return {"out": out, "lse": lse}


def _attend_one(
    a: Arguments, request: int, rows: slice, step: float, dtype: torch.dtype
) -> Attended:
    """Return the result of a request's query tokens, the last of its tokens in the pool."""
    length, query = int(a.seq_lens[request]), a.query[rows].to(dtype)  # [tokens, heads, dim]
    keys = _gather(a.key_pool, a.block_table[request], length).to(dtype) * a.k_scale
    values = _gather(a.value_pool, a.block_table[request], length).to(dtype) * a.v_scale
    tokens, heads = query.shape[:2]
    groups = query.unflatten(1, (keys.shape[0], heads // keys.shape[0]))
    logits = torch.einsum("thgd,hld->thgl", groups, keys).reshape(tokens, heads, length)
    logits *= a.scale
    if a.soft_cap > 0:
        logits = a.soft_cap * torch.tanh(logits / a.soft_cap)
    ends = torch.arange(length - tokens + 1, length + 1, device=query.device)[:, None, None]
    position = torch.arange(length, device=query.device)
    masked = (position >= ends) | (position < first_visible(ends, a.window))
    logits.masked_fill_(masked, float("-inf"))  # in place: they may take gigabytes
    if a.sinks is not None:
        sinks = a.sinks.to(dtype).expand(tokens, heads).unsqueeze(-1)
        logits = torch.cat((logits, sinks), dim=-1)
    lse = torch.logsumexp(logits, dim=-1) if logits.shape[-1] else logits.new_full(
        (tokens, heads), float("-inf")
    )  # fmt: skip
    finite = torch.where(lse.isneginf(), 0.0, lse)  # -inf - -inf would be NaN
    weights = logits[..., :length].sub_(finite.unsqueeze(-1)).exp_()
    weights = weights.unflatten(1, groups.shape[1:3])
    out = torch.einsum("thgl,hld->thgd", weights, values)
    seen = (~masked).to(dtype).unsqueeze(2)
    weights += step * seen
    bound = torch.einsum("thgl,hld->thgd", weights, values.abs())
    return Attended(rows.start, tokens, out.flatten(1, 2), lse, bound.flatten(1, 2))


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
