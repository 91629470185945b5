"""The shapes and dtypes that the attention kernels are compiled for."""

from __future__ import annotations

from types import MappingProxyType

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import DTYPES, SCALARS, Variant

KV_BLOCK = 16  # tokens in a block of the pool
MOST_TOKENS = 16  # query tokens of a request up to which decode attention runs it
MOST_GROUP = 255  # query heads per KV head: limit of the kernels' exact division
HEAD_TILES = (64, 128, 256)  # values to which head_dim is rounded up at compile time
SAME, E4M3 = "SCALAR_T", "kiln::e4m3"  # element types of the pool
PARAMS = MappingProxyType(
    {
        "scalar_t": ["kiln::bf16", "kiln::fp16"],
        "head_tile": [str(tile) for tile in HEAD_TILES],
        "kv_t": [SAME, E4M3],
    }
)


def head_tile(head_dim: int) -> int:
    """Return head_dim rounded up to a tile; head_dim itself if no kernel supports it."""
    tile = next((tile for tile in HEAD_TILES if head_dim <= tile), head_dim)
    return head_dim if head_dim % 16 else tile


def is_supported(variant: Variant) -> bool:
    """Return whether a variant is built; variants that no model needs would only cost build time.

    bf16 supports everything except an e4m3 pool with head_dim above 128; fp16 supports neither an
    e4m3 pool nor head_dim above 128.
    """
    plain, narrow = variant["kv_t"] == SAME, variant["head_tile"] != "256"
    return plain and narrow if variant["scalar_t"] == "kiln::fp16" else plain or narrow


def variant_of(a: Arguments) -> dict[str, str]:
    """Return the compile-time values that both kernels have, for a call."""
    return {
        "scalar_t": SCALARS[a.query.dtype],
        "head_tile": str(head_tile(a.query.shape[2])),
        "kv_t": SAME if a.key_pool.dtype == a.query.dtype else E4M3,
    }


def pool_dtype(variant: Variant) -> torch.dtype:
    """Return the dtype of the pool's elements."""
    same = variant["kv_t"] == SAME
    return DTYPES[variant["scalar_t"]] if same else torch.float8_e4m3fn
