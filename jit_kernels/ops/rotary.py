"""Rotary embeddings, NeoX style: query and key in one launch."""

from __future__ import annotations

import torch

from kiln.jit_kernels.shapes import check_dtype, takes_arrays
from kiln.jit_kernels.spec import (
    DTYPES,
    SCALARS,
    Bound,
    Cost,
    Gpu,
    KernelSpec,
    LaunchGeometry,
    Sizes,
    Variant,
)
from kiln.jit_kernels.torch_ops import call, define

_THREADS = 160  # of a block at most; blocks of few start sooner
_MANY = 64  # blocks a multiprocessor: some rounds of what runs at once


@takes_arrays
def apply_rotary(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin_table: torch.Tensor
) -> None:
    """Rotate query and key, in place, by the angles of their positions.

    positions: [num_tokens] int64, each below max_position; query: [num_tokens, num_heads,
    head_dim]; key: [num_tokens, num_kv_heads, head_dim]; cos_sin_table: [max_position,
    rotary_dim] float32, cosines then sines (see rotary_table). Dimensions past rotary_dim stay.
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
    call(_SPEC, positions.contiguous(), query, key, cos_sin_table.contiguous())


def _check_heads(name: str, x: torch.Tensor, table: torch.Tensor) -> None:
    if x.dim() != 3 or table.dim() != 2 or x.shape[-1] < table.shape[-1] or table.shape[-1] % 2:
        raise ValueError(
            f"apply_rotary: {name} is {list(x.shape)}, table {list(table.shape)}; want [tokens, "
            f"heads, head_dim] and [max_position, rotary_dim], rotary_dim even, at most head_dim"
        )
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"apply_rotary: {name} has strides {x.stride()}, want a dense last one")


def rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, head_dim] turned by cosines, sines [tokens, 1, rotary_dim / 2]."""
    half = cosines.shape[-1]
    wide = x if x.dtype == torch.float64 else x.float()
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], x[..., 2 * half :]
    turned = (a * cosines).addcmul_(b, sines, value=-1), (b * cosines).addcmul_(a, sines)
    if rest.shape[-1]:
        return torch.cat((torch.cat(turned, dim=-1).to(x.dtype), rest), dim=-1)
    return torch.cat(turned, dim=-1).to(x.dtype)


def _reference(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin_table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new query and key."""
    rows = cos_sin_table.index_select(0, positions)
    cosines, sines = rows.unsqueeze(1).chunk(2, dim=-1)
    return rotated(query, cosines, sines), rotated(key, cosines, sines)


def _bind(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin_table: torch.Tensor
) -> Bound:
    tokens, heads, kv_heads = positions.shape[0], query.shape[1], key.shape[1]
    half = cos_sin_table.shape[1] // 2
    strides = (query.stride(0), query.stride(1), key.stride(0), key.stride(1))
    values = (positions, query, key, cos_sin_table, heads, kv_heads, half, *strides)
    sizes = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "half": half}
    return Bound({"scalar_t": SCALARS[query.dtype]}, sizes, values)


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Give a thread one vector of each half of a head, or in other cases some pairs.

    Of two heads where there are so many blocks that they would wait for each other anyway.
    """
    half, heads = sizes["half"], sizes["heads"] + sizes["kv_heads"]
    size = 16 // DTYPES[variant["scalar_t"]].itemsize
    pieces, odd = divmod(half, size)
    if odd or not 0 < pieces <= _THREADS:
        return LaunchGeometry((sizes["tokens"], 1, 1), (_THREADS, 1, 1))
    blocks = -(-heads // (_THREADS // pieces))
    each = 2 if sizes["tokens"] * blocks >= _MANY * gpu.num_multiprocessors else 1
    blocks = -(-blocks // each)
    at_once = max(1, -(-heads // (blocks * each)))  # so that all blocks have as many heads
    return LaunchGeometry((sizes["tokens"], blocks, 1), (pieces, at_once, 1))


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens, half = sizes["tokens"], sizes["half"]
    elements = tokens * (sizes["heads"] + sizes["kv_heads"]) * 2 * half
    moved = 2 * elements * DTYPES[variant["scalar_t"]].itemsize
    return Cost(moved + tokens * (8 + 2 * half * 4), 3 * elements)


def _inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[torch.Tensor, ...]:
    tokens, heads, kv_heads = sizes["tokens"], sizes["heads"], sizes["kv_heads"]
    head_dim = 2 * sizes["half"] + sizes.get("rest", 0)
    width = (heads + kv_heads) * head_dim  # query and key as views of one projection
    qkv = torch.randn(tokens, width + sizes.get("gap", 0), device=device)
    qkv = qkv.to(DTYPES[variant["scalar_t"]])
    query = qkv[:, : heads * head_dim].view(tokens, heads, head_dim)
    key = qkv[:, heads * head_dim : width].view(tokens, kv_heads, head_dim)
    angles = torch.rand(64, sizes["half"], device=device) * 100
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return torch.randint(64, (tokens,), device=device), query, key, table


_SIZES = [
    {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "half": half, "rest": rest, "gap": gap}
    for tokens, heads, kv_heads, half, rest, gap in [
        (0, 2, 1, 8, 0, 0), (1, 1, 1, 1, 0, 0), (3, 4, 2, 16, 0, 5), (2, 5, 1, 3, 3, 1),
        (7, 8, 8, 32, 0, 0), (2, 3, 1, 64, 16, 8), (3, 40, 3, 128, 0, 0), (2, 9, 2, 8, 8, 4),
        (2, 3, 1, 12, 8, 0), (2, 7, 2, 48, 0, 0), (260, 3, 2, 8, 0, 0),
    ]
]  # fmt: skip

_SPEC = KernelSpec(
    name="apply_rotary",
    source="rotary/apply_rotary.cu",
    entry="apply_rotary",
    schema="(Tensor positions, Tensor(a!) query, Tensor(b!) key, Tensor cos_sin_table) -> ()",
    arguments=("pointer",) * 4 + ("int32",) * 3 + ("int64",) * 4,
    params={"scalar_t": list(DTYPES)},
    bind=_bind,
    geometry=_geometry,
    cost=_cost,
    reference=_reference,
    make_inputs=_inputs,
    sizes=_SIZES,
    bench_sizes=[
        {"tokens": tokens, "heads": 32, "kv_heads": 8, "half": 64}
        for tokens in (1, 16, 128, 1024, 8192)
    ],
    tolerance={torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    paper="https://arxiv.org/abs/2104.09864",
)
SPECS = [_SPEC]
define(SPECS)
