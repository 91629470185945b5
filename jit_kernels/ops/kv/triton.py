"""Triton forms of the kernels that write the KV pool.

A program handles one head of one token, or one piece of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.ops.norm.factors import rounds_once
from kiln.jit_kernels.ops.quantization.triton import _encode

_PIECE = 4096  # elements that a program of copy_blocks copies
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _loaded(
    row, weight, columns, mask, scale, weight_offset, NORM: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Load elements of a head, normalised if NORM, and rounded only once if ONCE."""
    dtype = row.dtype.element_ty
    x = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
        if ONCE:
            x = (x * scale * (weight_offset + w)).to(dtype).to(tl.float32)
        else:
            x = ((x * scale).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
    return x


@triton.jit
def _store_head(  # noqa: PLR0913
    to, row, weight, angles, head_dim, half, inverse_dim, eps, weight_offset, scale,
    NORM: tl.constexpr, ONCE: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
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
    x = _loaded(row, weight, columns, mask, norm, weight_offset, NORM, ONCE)
    partner = _loaded(row, weight, other, mask, norm, weight_offset, NORM, ONCE)
    angle = tl.where(left, columns, columns - half)
    cosines = tl.load(angles + angle, mask=turned, other=1.0)
    sines = tl.load(angles + half + angle, mask=turned, other=0.0)
    y = x * cosines + tl.where(left, -partner, partner) * sines
    tl.debug_barrier()  # ``to`` may be ``row``: all threads load before any stores
    if FP8:
        tl.store(to + columns, _encode(y.to(row.dtype.element_ty).to(tl.float32) / scale, False),
                 mask=mask)  # fmt: skip
    else:
        tl.store(to + columns, y.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _rope_store(  # noqa: PLR0913
    out, key_pool, value_pool, query, key, value, positions, cos_sin_table, slot_mapping,
    query_weight, key_weight, heads, kv_heads, head_dim, half, block_size,
    out_stride, out_head_stride, query_stride, query_head_stride, key_stride, key_head_stride,
    value_stride, value_head_stride, key_block, key_head, key_place, value_block, value_head,
    value_place, inverse_dim, eps, weight_offset, k_scale, v_scale,
    NORM: tl.constexpr, ONCE: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    angles = cos_sin_table + tl.load(positions + token) * 2 * half
    if head < heads:
        _store_head(out + token * out_stride + head * out_head_stride,
                    query + token * query_stride + head * query_head_stride, query_weight, angles,
                    head_dim, half, inverse_dim, eps, weight_offset, 1.0, NORM, ONCE, False,
                    BLOCK)  # fmt: skip
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            block = slot // block_size
            place = slot % block_size
            kv_head = head - heads
            if kv_head < kv_heads:
                to = key_pool + block * key_block + kv_head * key_head + place * key_place
                row = key + token * key_stride + kv_head * key_head_stride
                _store_head(to, row, key_weight, angles, head_dim, half, inverse_dim, eps,
                            weight_offset, k_scale, NORM, ONCE, FP8, BLOCK)  # fmt: skip
            else:
                h = kv_head - kv_heads
                to = value_pool + block * value_block + h * value_head + place * value_place
                row = value + token * value_stride + h * value_head_stride
                _store_head(to, row, key_weight, angles, head_dim, 0, inverse_dim, eps,
                            weight_offset, v_scale, False, ONCE, FP8, BLOCK)  # fmt: skip


def rope_store(a: Arguments) -> None:
    """Norm, rotate and store."""
    (tokens, heads, head_dim), kv_heads = a.query.shape, a.key.shape[1]
    if not tokens:
        return
    norm, fp8 = a.query_weight is not None, a.key_pool.dtype == torch.float8_e4m3fn
    pools = [pool.view(torch.uint8) if fp8 else pool for pool in (a.key_pool, a.value_pool)]
    _rope_store[(tokens, heads + 2 * kv_heads)](
        a.out, *pools, a.query, a.key, a.value, a.positions, a.cos_sin_table, a.slot_mapping,
        a.query_weight if norm else a.query, a.key_weight if norm else a.key,
        heads, kv_heads, head_dim, a.cos_sin_table.shape[1] // 2, a.key_pool.shape[2],
        *(stride for x in (a.out, a.query, a.key, a.value) for stride in x.stride()[:2]),
        *a.key_pool.stride()[:3], *a.value_pool.stride()[:3],
        1 / head_dim, a.eps, a.weight_offset, a.k_scale, a.v_scale,
        norm, rounds_once(a), fp8, triton.next_power_of_2(head_dim), num_warps=1,
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


def copy_blocks(a: Arguments) -> None:
    """Copy blocks within each pool."""
    size = a.pool[0, 0].numel()
    if a.pairs.shape[0] and size:
        grid = (a.pairs.shape[0], a.pool.shape[0], -(-size // _PIECE))
        bits = a.pool.view(_BITS[a.pool.element_size()])
        _copy_blocks[grid](bits, a.pairs, size, a.pool.stride(0), a.pool.stride(1), _PIECE)
