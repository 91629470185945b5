"""The public functions of LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kiln.jit_kernels.ops.lora.spec import LORA_EXPAND, LORA_SHRINK, LORA_SHRINK_EMBEDDING
from kiln.jit_kernels.ops.lora.split import COLUMNS, Workspace, spread_of
from kiln.jit_kernels.ops.lora.tiles import Tiles, tile_of
from kiln.jit_kernels.ops.shared.shapes import check_dtype, check_shape
from kiln.jit_kernels.torch_ops import call


class PoolTables(NamedTuple):
    """The adapter pool on the device: its weights, and where those of a site are.

    ``values``: [num_elements]. The tables are [parts, num_slots], by the parts of the site:
    ``ranks`` int32, ``scales`` float32, ``a_offsets`` and ``b_offsets`` int64 in elements of
    ``values``. A part of rank 0 adds nothing, and nothing else of it is read.
    """

    values: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    a_offsets: torch.Tensor
    b_offsets: torch.Tensor


def lora_shrink(
    x: torch.Tensor,
    pool: PoolTables,
    tiles: Tiles,
    h: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Write A x of the site's parts, one part behind the other, to h.

    x: [num_tokens, input_size] in the pool's dtype, rows may be strided. tiles: the tokens that
    have an adapter. h: [num_tokens, width] float32, width at least the sum of the parts' ranks in
    any slot in use; elements beyond that sum, and rows without an adapter, are left as they are.
    The bits of a row depend on no other row. workspace: of ``make_workspace``, for as many tiles
    and columns. Raises ValueError on a wrong shape, TypeError on a wrong dtype.
    Source: https://arxiv.org/abs/2310.18547
    """
    check_dtype("lora_shrink", x=x, pool=pool.values)
    _check("lora_shrink", tiles, x.shape[0], h)
    blocks = len(tiles.slots) * -(-h.shape[1] // COLUMNS)
    if spread_of(tiles.tokens.shape[1]) > 1 and len(workspace.arrivals) < blocks:
        raise ValueError(
            f"lora_shrink: the workspace has {len(workspace.arrivals)} arrivals; "
            f"{len(tiles.slots)} tiles and {h.shape[1]} columns of h need {blocks}"
        )
    call(
        LORA_SHRINK,
        h=h,
        x=x if x.stride(1) == 1 else x.contiguous(),
        adapter_pool=pool.values,
        tile_slots=tiles.slots,
        tile_tokens=tiles.tokens,
        rank_table=pool.ranks,
        a_table=pool.a_offsets,
        partials=workspace.partials,
        arrivals=workspace.arrivals,
    )


def lora_expand(
    h: torch.Tensor,
    pool: PoolTables,
    tiles: Tiles,
    part_ends: Sequence[int],
    out: torch.Tensor,
) -> None:
    """Add scale * B h of each part to its columns of out, in place.

    h, tiles: as in lora_shrink. part_ends: where the columns of each part end in out. out:
    [num_tokens, output_size] in the pool's dtype, dense rows, any row stride. Each sum is float32
    and is rounded once, when it is added. Raises ValueError on a wrong shape, TypeError on a wrong
    dtype.
    """
    check_dtype("lora_expand", out=out, pool=pool.values)
    _check("lora_expand", tiles, out.shape[0], h)
    end0, end1 = two_ends("lora_expand", part_ends, pool, out)
    call(
        LORA_EXPAND,
        out=out,
        h=h,
        adapter_pool=pool.values,
        tile_slots=tiles.slots,
        tile_tokens=tiles.tokens,
        end0=end0,
        end1=end1,
        rank_table=pool.ranks,
        scale_table=pool.scales,
        b_table=pool.b_offsets,
    )


def lora_shrink_embedding(
    token_ids: torch.Tensor,
    pool: PoolTables,
    tiles: Tiles,
    h: torch.Tensor,
) -> None:
    """Write the columns of the embedding's A for some tokens to h.

    token_ids: [num_tokens] int64, within the vocabulary; the pool holds A as [vocab_size, rank].
    tiles, h: as in lora_shrink. Raises ValueError on a wrong shape, TypeError on a wrong dtype.
    """
    if token_ids.dtype != torch.int64:
        raise TypeError(f"lora_shrink_embedding: token_ids are {token_ids.dtype}; want torch.int64")
    check_shape("lora_shrink_embedding", "ranks", pool.ranks, (1, pool.ranks.shape[1]))
    _check("lora_shrink_embedding", tiles, token_ids.numel(), h)
    call(
        LORA_SHRINK_EMBEDDING,
        h=h,
        token_ids=token_ids.contiguous(),
        adapter_pool=pool.values,
        tile_slots=tiles.slots,
        tile_tokens=tiles.tokens,
        rank_table=pool.ranks,
        a_table=pool.a_offsets,
    )


def two_ends(
    function: str, part_ends: Sequence[int], pool: PoolTables, out: torch.Tensor
) -> tuple[int, int]:
    """Return where the first two parts end in out; those behind the last one end with it.

    Raises ValueError if the ends are not those of the pool's parts, or rows of out are not dense.
    """
    ends = (0, *part_ends)
    if len(part_ends) != len(pool.ranks) or list(ends) != sorted(ends) or ends[-1] != out.shape[1]:
        raise ValueError(
            f"{function}: part_ends are {[*part_ends]}; want {len(pool.ranks)} numbers in order, "
            f"the last {out.shape[1]}, the columns of out"
        )
    if out.stride(1) != 1:
        raise ValueError(
            f"{function} works in place and needs dense rows; out has strides {out.stride()}"
        )
    end0, end1, *_ = (*part_ends, out.shape[1])
    return end0, end1


def _check(function: str, tiles: Tiles, tokens: int, h: torch.Tensor) -> None:
    check_shape(function, "h", h, (tokens, h.shape[-1]))
    check_shape(function, "tiles.tokens", tiles.tokens, (len(tiles.slots), tile_of(tokens)))
    for name, tensor, wanted in (
        ("tiles.slots", tiles.slots, torch.int32),
        ("tiles.tokens", tiles.tokens, torch.int32),
        ("h", h, torch.float32),
    ):
        if tensor.dtype != wanted:
            raise TypeError(f"{function}: {name} is {tensor.dtype}; want {wanted}")
