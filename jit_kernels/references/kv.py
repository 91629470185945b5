"""What the kernels of the family ``kv`` compute, in torch, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kiln.jit_kernels.ops.rotary.reference import rotated
from kiln.jit_kernels.parity import largest_error
from kiln.jit_kernels.spec import SCALARS

E4M3_MAX = 448.0
_MAX_ODD_SLOTS = 2**32  # the kernel divides 32 bits


def rope_store_reference(  # noqa: PLR0913 (the operator's arguments)
    out: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    eps: float,
    k_scale: float,
    v_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rotated query, and both pools, which it writes in place: they may be huge."""
    if query_weight is not None and key_weight is not None:
        query, key = _normalised(query, query_weight, eps), _normalised(key, key_weight, eps)
    cosines, sines = cos_sin_table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    store(key_pool, slot_mapping, rotated(key, cosines, sines), k_scale)
    store(value_pool, slot_mapping, value, v_scale)
    return rotated(query, cosines, sines), key_pool, value_pool


def store(pool: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    """Write x [tokens, kv_heads, head_dim] to slots of a pool [blocks, kv_heads, size, head_dim].

    An e4m3 pool takes x / scale, the nearest value at most 448 in size; slot -1 takes nothing.
    """
    kept = slots >= 0
    slots, x = slots[kept], x[kept]
    blocks, places = slots // pool.shape[2], slots % pool.shape[2]
    if pool.dtype == torch.float8_e4m3fn:
        pool.view(torch.uint8)[blocks, :, places] = narrowed(x, scale).view(torch.uint8)
    else:
        pool[blocks, :, places] = (x / scale).to(pool.dtype) if scale != 1.0 else x.to(pool.dtype)


def narrowed(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return x / scale in e4m3: the nearest number of at most 448 in size."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def copy_blocks_reference(pool: torch.Tensor, pairs: torch.Tensor) -> tuple[torch.Tensor]:
    """Return the pool [pools, blocks, ...], whose blocks it copies in place."""
    sources, targets = pairs[pairs[:, 0] >= 0].unbind(1)
    raw = pool if pool.element_size() != 1 else pool.view(torch.uint8)
    raw.index_copy_(1, targets, raw.index_select(1, sources))
    return (pool,)


_ROUNDING = {torch.float32: 6e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def rope_store_error(arguments: Sequence[Any], wanted: Sequence[torch.Tensor]) -> float:
    """Return the largest error of query and pools, each over what its own dtype allows."""
    worst = 0.0
    for got, want in zip(arguments[:3], wanted, strict=True):
        allowed = _ROUNDING.get(got.dtype, 0.075)  # e4m3: 2^-4, and what its input was rounded by
        if got.dtype == torch.float8_e4m3fn:
            want = want.double().clamp(-E4M3_MAX, E4M3_MAX)
        error = largest_error(got, want) / allowed
        if error != error:
            return error
        worst = max(worst, error)
    return worst


def check_pool(name: str, pool: torch.Tensor, dtype: torch.dtype, scale: float) -> None:
    """Refuse what cannot hold a model's keys or values.

    Raises TypeError on a dtype, ValueError on a shape, on rows that are not 16-byte aligned and
    on a scale other than 1 for a pool of the model's own dtype.
    """
    if pool.dtype not in (dtype, torch.float8_e4m3fn):
        raise TypeError(f"rope_store: {name} is {pool.dtype}; want {dtype} or float8_e4m3fn")
    if pool.dtype in SCALARS and scale != 1.0:
        raise ValueError(f"rope_store: a {name} of {pool.dtype} takes no scale, got {scale}")
    _check_aligned(name, pool, 4, 8 if pool.dtype == torch.float8_e4m3fn else 16)


def check_slots(blocks: int, block_size: int) -> None:
    """Refuse more slots than the kernel can divide by a block_size that is no power of two.

    Raises ValueError.
    """
    if block_size & (block_size - 1) and blocks * block_size > _MAX_ODD_SLOTS:
        raise ValueError(
            f"rope_store: {blocks} blocks of {block_size} tokens; want a block_size that is a "
            f"power of two for more than {_MAX_ODD_SLOTS} slots"
        )


def check_heads(name: str, x: torch.Tensor) -> None:
    """Refuse heads [tokens, heads, head_dim] that no 16-byte access can reach.

    Raises ValueError.
    """
    _check_aligned(name, x, 3, 16)


def _check_aligned(name: str, x: torch.Tensor, dims: int, alignment: int) -> None:
    size = x.element_size()
    steps = [x.data_ptr() % alignment, *(s * size % alignment for s in x.stride()[:-1])]
    if x.dim() != dims or (x.numel() and (x.stride(-1) != 1 or any(steps))):
        raise ValueError(
            f"rope_store: {name} {list(x.shape)} has strides {x.stride()}; want {dims} dimensions, "
            f"the last one dense, and rows that are {alignment}-byte aligned"
        )
