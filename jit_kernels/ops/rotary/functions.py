"""The public function of the rotary embedding."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.rotary.spec import APPLY_ROTARY
from kiln.jit_kernels.ops.shared.shapes import check_dtype, takes_arrays
from kiln.jit_kernels.torch_ops import call


@takes_arrays
def apply_rotary(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin_table: torch.Tensor
) -> None:
    """Rotate query and key, in place, by the angles of their positions.

    positions: [num_tokens] int64, each below max_position; query: [num_tokens, num_heads,
    head_dim]; key: [num_tokens, num_kv_heads, head_dim]; cos_sin_table: [max_position,
    rotary_dim] float32, cosines then sines (see rotary_table). Dimensions past rotary_dim are kept.
    Tokens and heads may be strided, the last dimension is dense. Raises ValueError on a wrong
    shape, TypeError on a wrong dtype. Source: https://arxiv.org/abs/2104.09864
    """
    check_dtype("apply_rotary", query=query, key=key)
    if positions.dtype != torch.int64 or cos_sin_table.dtype != torch.float32:
        raise TypeError(
            f"apply_rotary: positions are {positions.dtype}, want torch.int64; cos_sin_table is "
            f"{cos_sin_table.dtype}, want torch.float32"
        )
    tokens = (positions.numel(),)
    if positions.dim() != 1 or query.shape[:1] != tokens or key.shape[:1] != tokens:
        raise ValueError(
            f"apply_rotary: positions {list(positions.shape)}, query {list(query.shape)} and key "
            f"{list(key.shape)} must agree in their first dimension"
        )
    _check_heads("query", query, cos_sin_table)
    _check_heads("key", key, cos_sin_table)
    call(
        APPLY_ROTARY,
        positions=positions.contiguous(),
        query=query,
        key=key,
        cos_sin_table=cos_sin_table.contiguous(),
    )


def _check_heads(name: str, x: torch.Tensor, table: torch.Tensor) -> None:
    if x.dim() != 3 or table.dim() != 2 or x.shape[-1] < table.shape[-1] or table.shape[-1] % 2:
        raise ValueError(
            f"apply_rotary: {name} is {list(x.shape)}, table {list(table.shape)}; want [tokens, "
            f"heads, head_dim] and [max_position, rotary_dim], rotary_dim even, at most head_dim"
        )
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"apply_rotary: {name} has strides {x.stride()}, want a dense last one")
