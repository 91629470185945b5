"""Triton forms of what writes the KV pool: same arguments as the operators, written in place.

A program takes a head of a token, or a piece of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kiln.jit_kernels.triton_ops.quantization import _encode

_PIECE = 4096  # elements that a program of copy_blocks takes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _loaded(row, weight, columns, mask, scale, NORM: tl.constexpr):
    """Return elements of a head, normed where there is a norm."""
    dtype = row.dtype.element_ty
    x = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
        x = ((x * scale).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
    return x


@triton.jit
def _way_of(  # noqa: PLR0913
    to, row, weight, angles, head_dim, half, inverse_dim, eps, scale,
    NORM: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store the head at ``row``; ``half`` 0 rotates nothing."""
    columns = tl.arange(0, BLOCK)
    mask = columns < head_dim
    left = columns < half
    turned = columns < 2 * half
    other = tl.where(left, columns + half, tl.where(turned, columns - half, columns))
    norm = 1.0
    if NORM:
        x = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
        norm = 1.0 / tl.sqrt(tl.sum(x * x, 0) * inverse_dim + eps)
    x = _loaded(row, weight, columns, mask, norm, NORM)
    partner = _loaded(row, weight, other, mask, norm, NORM)
    angle = tl.where(left, columns, columns - half)
    cosines = tl.load(angles + angle, mask=turned, other=1.0)
    sines = tl.load(angles + half + angle, mask=turned, other=0.0)
    y = x * cosines + tl.where(left, -partner, partner) * sines
    tl.debug_barrier()  # ``to`` may be ``row``: nobody stores before all have loaded
    if FP8:
        tl.store(to + columns, _encode(y.to(row.dtype.element_ty).to(tl.float32) / scale, False),
                 mask=mask)  # fmt: skip
    else:
        tl.store(to + columns, y.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _rope_store(  # noqa: PLR0913
    out, key_pool, value_pool, query, key, value, positions, table, slots, query_weight,
    key_weight, heads, kv_heads, head_dim, half, block_size, out_stride, out_head,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, key_block,
    key_pool_head, key_place, value_block, value_pool_head, value_place, inverse_dim, eps,
    k_scale, v_scale, NORM: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    angles = table + tl.load(positions + token) * 2 * half
    if head < heads:
        _way_of(out + token * out_stride + head * out_head,
                query + token * query_stride + head * query_head, query_weight, angles,
                head_dim, half, inverse_dim, eps, 1.0, NORM, False, BLOCK)  # fmt: skip
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            block = slot // block_size
            place = slot % block_size
            kv_head = head - heads
            if kv_head < kv_heads:
                to = key_pool + block * key_block + kv_head * key_pool_head + place * key_place
                _way_of(to, key + token * key_stride + kv_head * key_head, key_weight, angles,
                        head_dim, half, inverse_dim, eps, k_scale, NORM, FP8, BLOCK)  # fmt: skip
            else:
                h = kv_head - kv_heads
                to = value_pool + block * value_block + h * value_pool_head + place * value_place
                _way_of(to, value + token * value_stride + h * value_head, key_weight, angles,
                        head_dim, 0, inverse_dim, eps, v_scale, False, FP8, BLOCK)  # fmt: skip


def rope_store(*arguments: Any) -> None:
    """Norm, rotate and store; the arguments of the operator."""
    out, key_pool, value_pool, query, key, value, positions, table, slots = arguments[:9]
    query_weight, key_weight, eps, k_scale, v_scale = arguments[9:]
    (tokens, heads, head_dim), kv_heads = query.shape, key.shape[1]
    fp8 = key_pool.dtype == torch.float8_e4m3fn
    pools = [pool.view(torch.uint8) if fp8 else pool for pool in (key_pool, value_pool)]
    if not tokens:
        return
    _rope_store[(tokens, heads + 2 * kv_heads)](
        out, *pools, query, key, value, positions, table, slots,
        query if query_weight is None else query_weight, key if key_weight is None else key_weight,
        heads, kv_heads, head_dim, table.shape[1] // 2, key_pool.shape[2],
        *(stride for x in (out, query, key, value) for stride in x.stride()[:2]),
        *key_pool.stride()[:3], *value_pool.stride()[:3], 1 / head_dim, eps, k_scale, v_scale,
        query_weight is not None, fp8, triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip


@triton.jit
def _copy_blocks(pool, pairs, size, pool_stride, block_stride, PIECE: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    source = tl.load(pairs + 2 * pair)
    target = tl.load(pairs + 2 * pair + 1)
    if source >= 0:
        columns = tl.program_id(2).to(tl.int64) * PIECE + tl.arange(0, PIECE)
        base = pool + tl.program_id(1).to(tl.int64) * pool_stride + columns
        x = tl.load(base + source * block_stride, mask=columns < size)
        tl.store(base + target * block_stride, x, mask=columns < size)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks within each pool; shapes as the public copy_blocks."""
    size = pool[0, 0].numel()
    if pairs.shape[0] and size:
        grid = (pairs.shape[0], pool.shape[0], -(-size // _PIECE))
        bits = pool.view(_BITS[pool.element_size()])
        _copy_blocks[grid](bits, pairs, size, pool.stride(0), pool.stride(1), _PIECE)
