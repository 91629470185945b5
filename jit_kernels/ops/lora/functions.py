"""The public functions of LoRA."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kiln.jit_kernels.ops.lora.spec import LORA_EXPAND, LORA_SHRINK, LORA_SHRINK_EMBEDDING
from kiln.jit_kernels.shapes import check_dtype, check_shape
from kiln.jit_kernels.torch_ops import call


class PoolTables(NamedTuple):
    """The adapter pool on the device: weights, and where they are.

    ``values``: [num_elements]. The tables are [num_parts, num_slots]: ``ranks`` int32, ``scales``
    float32, ``a_offsets`` and ``b_offsets`` int64 in elements of ``values``. A part of rank 0
    adds nothing, and nothing else of it is read.
    """

    values: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    a_offsets: torch.Tensor
    b_offsets: torch.Tensor


def lora_shrink(
    x: torch.Tensor,
    pool: PoolTables,
    token_slots: torch.Tensor,
    rows: torch.Tensor,
    h: torch.Tensor,
) -> None:
    """Write A x of the site's parts, one part behind the other, to h.

    x: [num_tokens, input_size] in the pool's dtype, rows may be strided. token_slots: [num_tokens]
    int32, the adapter slot of each token, -1 for none. rows: [parts] int32, the site's rows in the
    tables. h: [num_tokens, width] float32, width at least the sum of the parts' ranks in any slot
    in use; elements beyond that sum, and rows without an adapter, are left as they are. The bits of
    a row depend on no other row. Raises ValueError on a wrong shape, TypeError on a wrong dtype.
    Source: https://arxiv.org/abs/2310.18547
    """
    check_dtype("lora_shrink", x=x, pool=pool.values)
    _check_tokens("lora_shrink", token_slots, x.shape[0], h, rows)
    call(
        LORA_SHRINK,
        h=h,
        x=x if x.stride(1) == 1 else x.contiguous(),
        adapter_pool=pool.values,
        token_slots=token_slots,
        rows=rows,
        rank_table=pool.ranks,
        a_table=pool.a_offsets,
    )


def lora_expand(
    h: torch.Tensor,
    pool: PoolTables,
    token_slots: torch.Tensor,
    rows: torch.Tensor,
    part_starts: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Add scale * B h of each part to its columns of out, in place.

    h, token_slots, rows: as in lora_shrink. part_starts: [parts + 1] int32, the first column of
    each part in out, and out's width. out: [num_tokens, output_size] in the pool's dtype, dense
    rows, any row stride. Each sum is float32 and is rounded once, when it is added. Raises
    ValueError on a wrong shape, TypeError on a wrong dtype.
    """
    check_dtype("lora_expand", out=out, pool=pool.values)
    _check_tokens("lora_expand", token_slots, out.shape[0], h, rows)
    check_shape("lora_expand", "part_starts", part_starts, (rows.numel() + 1,))
    if out.stride(1) != 1:
        raise ValueError(
            f"lora_expand works in place and needs dense rows; out has strides {out.stride()}"
        )
    call(
        LORA_EXPAND,
        out=out,
        h=h,
        adapter_pool=pool.values,
        token_slots=token_slots,
        rows=rows,
        part_starts=part_starts,
        rank_table=pool.ranks,
        scale_table=pool.scales,
        b_table=pool.b_offsets,
    )


def lora_shrink_embedding(
    token_ids: torch.Tensor,
    pool: PoolTables,
    token_slots: torch.Tensor,
    rows: torch.Tensor,
    h: torch.Tensor,
) -> None:
    """Write the columns of the embedding's A for some tokens to h.

    token_ids: [num_tokens] int64, within the vocabulary; the pool holds A as [vocab_size, rank].
    rows: [1]. token_slots, h: as in lora_shrink. Raises ValueError on a wrong shape, TypeError on a
    wrong dtype.
    """
    if token_ids.dtype != torch.int64:
        raise TypeError(f"lora_shrink_embedding: token_ids are {token_ids.dtype}; want torch.int64")
    check_shape("lora_shrink_embedding", "rows", rows, (1,))
    _check_tokens("lora_shrink_embedding", token_slots, token_ids.numel(), h, rows)
    call(
        LORA_SHRINK_EMBEDDING,
        h=h,
        token_ids=token_ids.contiguous(),
        adapter_pool=pool.values,
        token_slots=token_slots,
        rows=rows,
        rank_table=pool.ranks,
        a_table=pool.a_offsets,
    )


def _check_tokens(
    function: str, token_slots: torch.Tensor, tokens: int, h: torch.Tensor, rows: torch.Tensor
) -> None:
    check_shape(function, "token_slots", token_slots, (tokens,))
    check_shape(function, "h", h, (tokens, h.shape[-1]))
    for name, tensor, wanted in (
        ("token_slots", token_slots, torch.int32),
        ("rows", rows, torch.int32),
        ("h", h, torch.float32),
    ):
        if tensor.dtype != wanted:
            raise TypeError(f"{function}: {name} is {tensor.dtype}; want {wanted}")
