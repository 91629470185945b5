"""Code shared by the Triton forms of decode and prefill attention: a step of online softmax."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kiln.jit_kernels.declare.arch import gpu
from kiln.jit_kernels.declare.parameters import Arguments

LOG2E = tl.constexpr(1.44269504088896)


def tiles_that_fit(query: torch.Tensor, rows: int, keys: int, dim: int) -> int:
    """Return how many tiles of keys and values fit in shared memory besides the queries.

    Under Triton's interpreter, which has no shared memory, it is 8.
    """
    if not query.is_cuda:
        return 8
    row = dim * query.element_size()
    room = gpu(query.device.index).max_shared_bytes - rows * row - 1024  # Triton's own
    return max(0, room // (2 * keys * row))


def options_of(a: Arguments) -> dict[str, Any]:
    """Return the compile-time arguments of both kernels."""
    # Triton's interpreter stores bfloat16 as integers, and would multiply those.
    compute = tl.float32
    if a.query.is_cuda:
        compute = tl.bfloat16 if a.query.dtype == torch.bfloat16 else tl.float16
    return {
        "D": a.query.shape[2],
        "DIM": triton.next_power_of_2(a.query.shape[2]),
        "FP8": a.key_pool.dtype != a.query.dtype,
        "LSE": a.lse.numel() > 0,
        "SINKS": a.sinks is not None,
        "COMPUTE": compute,
    }


def pools_of(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pools of keys and values; fp8 pools as bytes."""
    if a.key_pool.dtype == a.query.dtype:
        return a.key_pool, a.value_pool
    return a.key_pool.view(torch.uint8), a.value_pool.view(torch.uint8)


@triton.jit
def widen(bits):
    """Return the float32 values of e4m3 bits; 0x7f and 0xff are NaN."""
    size = (bits.to(tl.int32) & 0x7F) << 20
    value = size.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    value = tl.where(size == 0x7F << 20, float("nan"), value)
    return tl.where(bits.to(tl.int32) >= 128, -value, value)


@triton.jit
def first_visible(end, window):
    """Return the first visible key of rows that end at ``end``; see visible.py."""
    first = tl.where(window > 0, end - window, 0)
    if window < 0:
        position = tl.maximum(end - 1, 0)
        first = position - position % -window
    return first


@triton.jit
def capped(y, soft_cap):
    """Return logits in log2 units, capped unless soft_cap is 0."""
    if soft_cap > 0:
        y = soft_cap * LOG2E * (1 - 2 / (tl.exp2(y * (2 / soft_cap)) + 1))
    return y


@triton.jit
def finish(  # noqa: PLR0913
    out, lse, sinks, row, head, used, o, top, total, v_scale, D: tl.constexpr, DIM: tl.constexpr,
    LSE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Divide by the sum of weights and store. A sink adds one logit without a value to that sum."""
    if SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0) * LOG2E
        best = tl.maximum(top, sink)
        o = o * tl.exp2(top - best)[:, None]
        total = total * tl.exp2(top - best) + tl.exp2(sink - best)
        top = best
    some = total > 0
    scale = tl.where(some, v_scale / tl.where(some, total, 1.0), 0.0)
    d = tl.arange(0, DIM)
    to = out + row[:, None] * D + d[None, :]
    tl.store(to, (o * scale[:, None]).to(out.dtype.element_ty), mask=used[:, None] & (d < D)[None])
    if LSE:
        value = (top + tl.log2(tl.where(some, total, 1.0))) / LOG2E
        tl.store(lse + row, tl.where(some, value, float("-inf")), mask=used)


@triton.jit
def step(  # noqa: PLR0913
    o, top, total, q, keys, values, table, start, end, limit, least, key_block, key_token,
    value_block, value_token, qk_scale, soft_cap, D: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, FP8: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Update an online softmax with the tile of keys that begins at ``start``.

    Returns each row's sum of weighted values, its largest logit and its sum of weights. In fp16 the
    largest logit is lowered, so that small weights keep more bits.
    """
    LIFT: tl.constexpr = 6 if tl.float16 == COMPUTE else 0
    key, d = start + tl.arange(0, TILE), tl.arange(0, DIM)
    here = key < end
    block = tl.load(table + key // 16, mask=here, other=0).to(tl.int64)
    at = block * key_block + key % 16 * key_token
    wanted = (d < D)[:, None] & here[None, :]
    k = tl.load(keys + at[None, :] + d[:, None], mask=wanted, other=0)
    at = block * value_block + key % 16 * value_token
    wanted = here[:, None] & (d < D)[None, :]
    v = tl.load(values + at[:, None] + d[None, :], mask=wanted, other=0)
    if FP8:
        k, v = widen(k), widen(v)
    y = capped(tl.dot(q, k.to(COMPUTE)) * (qk_scale * LOG2E), soft_cap)
    seen = (key[None, :] < limit[:, None]) & (key[None, :] >= least[:, None])
    y = tl.where(seen & here[None, :], y, float("-inf"))
    best = tl.maximum(top, tl.max(y, 1) - LIFT)
    base = tl.where(best > float("-inf"), best, 0.0)
    p, f = tl.exp2(y - base[:, None]), tl.exp2(top - base)
    return o * f[:, None] + tl.dot(p.to(COMPUTE), v.to(COMPUTE)), best, total * f + tl.sum(p, 1)
