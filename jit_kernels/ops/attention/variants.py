"""The shapes and dtypes that the attention kernels are compiled for."""

from __future__ import annotations

from types import MappingProxyType

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import DTYPES, SCALARS, Variant

KV_BLOCK = 16  # tokens of a block of the pool
MOST_TOKENS = 16  # of a request in a step for decode attention; with more it is prefill's
MOST_GROUP = 255  # query heads of a KV head: the kernels' division is exact up to here
HEAD_TILES = (64, 128, 256)  # head_dim, rounded up: the kernels' shapes at compile time
SAME, E4M3 = "SCALAR_T", "kiln::e4m3"  # element types of the pool
PARAMS = MappingProxyType(
    {
        "scalar_t": ["kiln::bf16", "kiln::fp16"],
        "head_tile": [str(tile) for tile in HEAD_TILES],
        "kv_t": [SAME, E4M3],
    }
)


def head_tile(head_dim: int) -> int:
    """Return what head_dim is rounded up to; head_dim itself where no kernel supports it."""
    tile = next((tile for tile in HEAD_TILES if head_dim <= tile), head_dim)
    return head_dim if head_dim % 16 else tile


def is_supported(variant: Variant) -> bool:
    """Return whether a variant is built: only those that models need, as each takes build time.

    bf16 has all but a pool of e4m3 with head_dim above 128; fp16 has neither e4m3 nor such heads.
    """
    plain, narrow = variant["kv_t"] == SAME, variant["head_tile"] != "256"
    return plain and narrow if variant["scalar_t"] == "kiln::fp16" else plain or narrow


def variant_of(a: Arguments) -> dict[str, str]:
    """Return the compile-time values of a call that both kernels have."""
    return {
        "scalar_t": SCALARS[a.query.dtype],
        "head_tile": str(head_tile(a.query.shape[2])),
        "kv_t": SAME if a.key_pool.dtype == a.query.dtype else E4M3,
    }


def pool_dtype(variant: Variant) -> torch.dtype:
    """Return the dtype of the pool's elements."""
    same = variant["kv_t"] == SAME
    return DTYPES[variant["scalar_t"]] if same else torch.float8_e4m3fn
