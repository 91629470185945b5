"""The cases on which the all-reduces are tested and timed: all ranks of a group in one launch."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant
from kiln.jit_kernels.ops.all_reduce.layout import VECTOR, Layout, vectors
from kiln.jit_kernels.ops.all_reduce.members import virtual_members

_WHOLE = {"fewer": 0, "alone": 0}  # as many ranks as the variant allows, all in one launch
SIZES = [
    {"n": n, "blocks": blocks, "gap": gap, **_WHOLE}
    for n, blocks, gap in [(0, 1, 0), (1, 1, 0), (7, 2, 3), (264, 2, 0), (1031, 3, 2)]
]
BENCH_SIZES = [{"n": 1 << power, "blocks": 16, **_WHOLE} for power in (9, 12, 15, 18, 21)]
FUSED_SIZES = [
    {"rows": rows, "d": d, "blocks": blocks, "gap": gap, "once": once, **_WHOLE}
    for rows, d, blocks, gap, once in [
        (0, 64, 1, 0, 0), (1, 1, 1, 0, 0), (3, 64, 2, 0, 1), (2, 60, 1, 0, 1), (5, 192, 2, 3, 0),
        (1, 2048, 1, 0, 0), (2, 1100, 3, 1, 1),
    ]
]  # fmt: skip
FUSED_BENCH_SIZES = [{"rows": rows, "d": 4096, "blocks": 16, **_WHOLE} for rows in (1, 8, 32, 128)]


def push_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random messages, with gaps between the ranks' if the sizes have a "gap"."""
    return _inputs(variant, sizes, device, push=True)


def pull_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random messages, with gaps between the ranks' if the sizes have a "gap"."""
    return _inputs(variant, sizes, device, push=False)


def _inputs(variant: Variant, sizes: Sizes, device: str, *, push: bool) -> dict[str, Any]:
    n = sizes["n"]
    num_bytes = n * DTYPES[variant["scalar_t"]].itemsize
    out, x = (_messages(variant, sizes, n, device) for _ in range(2))
    return {"out": out, "x": x, **_group(variant, sizes, num_bytes, device, push=push)}


def fused_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random rows for each rank, with gaps between the ranks' if the sizes have a "gap"."""
    rows, d, dtype = sizes["rows"], sizes["d"], DTYPES[variant["scalar_t"]]
    out, x, residual = (
        _messages(variant, sizes, rows * d, device).unflatten(1, (rows, d)) for _ in range(3)
    )
    num_bytes = rows * vectors(d * dtype.itemsize) * VECTOR
    return {
        "out": out,
        "residual": residual,
        "x": x,
        "weight": torch.randn(d, device=device).add_(1).to(dtype),
        **_group(variant, sizes, num_bytes, device, push=True),
        "eps": 1e-5,
        "weight_offset": float(sizes["gap"] % 2) if "gap" in sizes else 0.0,
        "round_once": bool(sizes.get("once", 0)),
    }


def world_of(variant: Variant, sizes: Sizes) -> int:
    """Return the number of ranks in a group."""
    return int(variant["max_world"]) - sizes["fewer"]


def _messages(variant: Variant, sizes: Sizes, n: int, device: str) -> torch.Tensor:
    world, gap = world_of(variant, sizes), sizes.get("gap", 0)
    return torch.randn(world, n + gap, device=device).to(DTYPES[variant["scalar_t"]])[:, :n]


def _group(
    variant: Variant, sizes: Sizes, num_bytes: int, device: str, *, push: bool
) -> dict[str, Any]:
    limits = (max(num_bytes, 1), 1) if push else (1, max(num_bytes, 1))
    layout = Layout(world_of(variant, sizes), sizes["blocks"], *limits)
    return virtual_members(layout, device).arguments()
