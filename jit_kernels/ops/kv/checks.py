"""The checks of rope_store's arguments."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import SCALARS
from kiln.jit_kernels.ops.shared.shapes import check_dtype, check_shape

CHUNK = 8  # elements of a head that a thread loads at once; kChunk of rope_store.cu
_MAX_HEAD_DIM = 256
_MAX_ODD_SLOTS = 2**32  # the kernel divides 32-bit numbers


def serves(head_dim: int, rotary_dim: int) -> bool:
    """Return whether rope_store supports heads of these sizes: no chunk may cross two halves."""
    return head_dim % CHUNK == 0 and head_dim <= _MAX_HEAD_DIM and rotary_dim % (2 * CHUNK) == 0


def check_rope_store(a: Arguments) -> None:
    """Check the arguments of the operator.

    Raises ValueError on a wrong shape, alignment or scale, TypeError on a wrong dtype.
    """
    _check_heads(a)
    _check_pools(a)
    for name in ("positions", "slot_mapping"):
        index = getattr(a, name)
        check_shape("rope_store", name, index, a.key.shape[:1])
        if index.dtype != torch.int64:
            raise TypeError(f"rope_store: {name} is {index.dtype}, want torch.int64")
    if (a.query_weight is None) != (a.key_weight is None):
        raise ValueError("rope_store: give query_weight and key_weight, or neither")
    for name in ("query_weight", "key_weight"):
        weight = getattr(a, name)
        if weight is not None:
            check_dtype("rope_store", query=a.query, **{name: weight})
            check_shape("rope_store", name, weight, a.key.shape[2:])


def _check_heads(a: Arguments) -> None:
    check_dtype("rope_store", query=a.query, key=a.key, value=a.value, out=a.out)
    table = a.cos_sin_table
    if table.dtype != torch.float32:
        raise TypeError(f"rope_store: cos_sin_table is {table.dtype}, want torch.float32")
    for name in ("query", "key", "value", "out"):
        _check_aligned(name, getattr(a, name), 3, 16)
    tokens, _, head_dim = a.key.shape
    check_shape("rope_store", "value", a.value, a.key.shape)
    check_shape("rope_store", "query", a.query, (tokens, a.query.shape[1], head_dim))
    check_shape("rope_store", "out", a.out, a.query.shape)
    if table.dim() != 2 or table.shape[1] > head_dim or not serves(head_dim, table.shape[1]):
        raise ValueError(
            f"rope_store: head_dim is {head_dim} and cos_sin_table {list(table.shape)}; want a "
            f"multiple of {CHUNK} up to {_MAX_HEAD_DIM}, and [max_position, rotary_dim] with a "
            f"multiple of {2 * CHUNK} up to head_dim"
        )


def _check_pools(a: Arguments) -> None:
    dtype = a.query.dtype
    pools = (("key_pool", a.key_pool, a.k_scale), ("value_pool", a.value_pool, a.v_scale))
    for name, pool, scale in pools:
        if pool.dtype not in (dtype, torch.float8_e4m3fn):
            raise TypeError(f"rope_store: {name} is {pool.dtype}; want {dtype} or float8_e4m3fn")
        if pool.dtype in SCALARS and scale != 1.0:
            raise ValueError(f"rope_store: a {name} of {pool.dtype} takes no scale, got {scale}")
        _check_aligned(name, pool, 4, 8 if pool.dtype == torch.float8_e4m3fn else 16)
    _, kv_heads, head_dim = a.key.shape
    blocks, _, block_size, _ = a.key_pool.shape
    check_shape("rope_store", "key_pool", a.key_pool, (blocks, kv_heads, block_size, head_dim))
    check_shape("rope_store", "value_pool", a.value_pool, a.key_pool.shape)
    if block_size & (block_size - 1) and blocks * block_size > _MAX_ODD_SLOTS:
        raise ValueError(
            f"rope_store: {blocks} blocks of {block_size} tokens; want a block_size that is a "
            f"power of two for more than {_MAX_ODD_SLOTS} slots"
        )
    if a.key_pool.dtype != a.value_pool.dtype:
        raise TypeError(f"rope_store: pools are {a.key_pool.dtype} and {a.value_pool.dtype}")


def _check_aligned(name: str, x: torch.Tensor, dims: int, alignment: int) -> None:
    size = x.element_size()
    steps = [x.data_ptr() % alignment, *(s * size % alignment for s in x.stride()[:-1])]
    if x.dim() != dims or (x.numel() and (x.stride(-1) != 1 or any(steps))):
        raise ValueError(
            f"rope_store: {name} {list(x.shape)} has strides {x.stride()}; want {dims} dimensions, "
            f"the last one dense, and rows that are {alignment}-byte aligned"
        )
