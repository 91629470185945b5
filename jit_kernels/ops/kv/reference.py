"""References of the kernels that write the KV pool, in torch."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.parity import largest_error
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.norm.reference import normalise
from kiln.jit_kernels.ops.rotary.reference import rotated

E4M3_MAX = 448.0
_ROUNDING = {torch.float32: 6e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
_E4M3_ROUNDING = 0.075  # 2^-4, plus the rounding of the input


def rope_store_reference(a: Arguments) -> Results:
    """Return the rotated query and both pools. The pools are written in place: they may be huge."""
    query, key = a.query, a.key
    if a.query_weight is not None and a.key_weight is not None:
        query, key = normalise(query, a.query_weight, a), normalise(key, a.key_weight, a)
    if a.cos_sin_table.shape[1]:
        rows = a.cos_sin_table.index_select(0, a.positions).unsqueeze(1)
        cosines, sines = rows.chunk(2, dim=-1)
        query, key = rotated(query, cosines, sines), rotated(key, cosines, sines)
    store(a.key_pool, a.slot_mapping, key, a.k_scale)
    store(a.value_pool, a.slot_mapping, a.value, a.v_scale)
    return {"out": query, "key_pool": a.key_pool, "value_pool": a.value_pool}


def store(pool: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    """Write x [tokens, kv_heads, head_dim] to slots of a pool [blocks, kv_heads, size, head_dim].

    An e4m3 pool stores x / scale, rounded to nearest and saturated at 448. Slot -1 is skipped.
    """
    kept = slots >= 0
    slots, x = slots[kept], x[kept]
    blocks, places = slots // pool.shape[2], slots % pool.shape[2]
    if pool.dtype == torch.float8_e4m3fn:
        pool.view(torch.uint8)[blocks, :, places] = narrowed(x, scale).view(torch.uint8)
    else:
        pool[blocks, :, places] = (x / scale).to(pool.dtype) if scale != 1.0 else x.to(pool.dtype)


def narrowed(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return x / scale in e4m3, rounded to nearest and saturated at 448."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def copy_blocks_reference(a: Arguments) -> Results:
    """Copy blocks in place; return the pool [pools, blocks, ...]."""
    sources, targets = a.pairs[a.pairs[:, 0] >= 0].unbind(1)
    raw = a.pool if a.pool.element_size() != 1 else a.pool.view(torch.uint8)
    raw.index_copy_(1, targets, raw.index_select(1, sources))
    return {"pool": a.pool}


def rope_store_error(a: Arguments, wanted: Results) -> float:
    """Return the largest error of query and pools, relative to the tolerance of each dtype."""
    worst = 0.0
    for name, want in wanted.items():
        got = getattr(a, name)
        if got.dtype == torch.float8_e4m3fn:
            want = want.double().clamp(-E4M3_MAX, E4M3_MAX)
        error = largest_error(got, want) / _ROUNDING.get(got.dtype, _E4M3_ROUNDING)
        if error != error:
            return error
        worst = max(worst, error)
    return worst
