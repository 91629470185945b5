"""The public functions that write the KV pool."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.kv.checks import check_rope_store
from kiln.jit_kernels.ops.kv.spec import COPY_BLOCKS, ROPE_STORE
from kiln.jit_kernels.ops.shared.shapes import check_shape, takes_arrays
from kiln.jit_kernels.torch_ops import call


@takes_arrays
def rope_store(  # noqa: PLR0913 (one launch does everything after the projection)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    *,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate query and key, store key and value in the pool, return the query.

    It gives the same bits as rms_norm with the weights [head_dim], if given, then apply_rotary,
    then a copy to the slots. ``eps``, ``weight_offset`` and ``round_once`` are rms_norm's. query:
    [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]; positions,
    slot_mapping: [num_tokens] int64; cos_sin_table: see apply_rotary, or without columns, [any, 0],
    for heads that are not rotated; pools: [num_blocks, num_kv_heads, block_size, head_dim],
    strided. Slot s is place s % block_size of block s // block_size; slot -1 stores nothing. A pool
    has the model's dtype or float8_e4m3fn, which stores x / scale, saturated. The query is written
    to ``out``, by default to query itself.

    Raises ValueError on a wrong shape, on rows that are not 16-byte aligned, on sizes for which
    ``serves`` is false, and on more than 2^32 slots where block_size is no power of two; TypeError
    on a wrong dtype.
    """
    out = query if out is None else out
    a = ROPE_STORE.parameters.Arguments(
        out=out,
        key_pool=key_pool,
        value_pool=value_pool,
        query=query,
        key=key,
        value=value,
        positions=positions.contiguous(),
        cos_sin_table=cos_sin_table.contiguous(),
        slot_mapping=slot_mapping.contiguous(),
        query_weight=query_weight,
        key_weight=key_weight,
        eps=eps,
        weight_offset=weight_offset,
        round_once=round_once,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    check_rope_store(a)
    call(ROPE_STORE, **a._asdict())
    return out


@takes_arrays
def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks within each of several pools: pool[:, target] = pool[:, source], in one launch.

    pool: [num_pools, num_blocks, ...], each block dense, 16-byte aligned and a multiple of 16
    bytes; one view may cover keys and values of all layers. pairs: [num_pairs, 2] int64, source and
    target; a target is in no other pair, and a negative source is padding. Raises ValueError on a
    wrong shape or layout, TypeError on pairs that are not int64.
    """
    if pairs.dtype != torch.int64:
        raise TypeError(f"copy_blocks: pairs is {pairs.dtype}, want torch.int64")
    check_shape("copy_blocks", "pairs", pairs, (pairs.shape[0], 2))
    size = pool.element_size()
    block = pool[0, 0] if pool.dim() >= 2 and pool.numel() else pool
    steps = (pool.data_ptr(), block.numel() * size, *(s * size for s in pool.stride()[:2]))
    if pool.dim() < 2 or not block.is_contiguous() or any(step % 16 for step in steps):
        raise ValueError(
            f"copy_blocks: pool {list(pool.shape)} has strides {pool.stride()}; want dense blocks, "
            f"16-byte aligned and of a multiple of 16 bytes"
        )
    if pool.numel():
        call(COPY_BLOCKS, pool=pool, pairs=pairs.contiguous())
