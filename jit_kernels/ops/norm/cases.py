"""The cases on which the norms are tested and timed."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant

SIZES = [
    {"rows": rows, "d": d, "gap": gap, "offset": offset, "once": once}
    for rows, d, gap, offset, once in [
        (0, 64, 0, 0, 0), (1, 1, 0, 0, 0), (3, 7, 0, 1, 0), (2, 129, 1, 0, 1), (5, 192, 8, 0, 1),
        (3, 2048, 0, 1, 1), (37, 64, 3, 0, 0), (35, 64, 0, 0, 0), (34, 60, 4, 0, 0),
        (2, 896, 0, 0, 0), (2, 2880, 0, 0, 1), (2, 4104, 8, 0, 0), (2, 4100, 3, 1, 0),
        (1, 8192, 0, 0, 0), (1, 16392, 0, 0, 0),
    ]
]  # fmt: skip
BENCH_SIZES = [{"rows": rows, "d": 4096} for rows in (1, 16, 128, 1024, 8192)] + [
    {"rows": rows, "d": d} for d in (896, 2048, 8192) for rows in (1, 128, 8192)
]


def rms_norm_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return rows of random numbers, with gaps between the rows if the sizes have a "gap"."""
    x = _rows(variant, sizes, device)
    factors = _factors(variant, sizes, device)
    return {"x": x, **factors, "out": _rows(variant, sizes, device), "eps": 1e-6}


def fused_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return rows of random numbers, with gaps between the rows if the sizes have a "gap"."""
    x, residual = _rows(variant, sizes, device), _rows(variant, sizes, device)
    return {"x": x, "residual": residual, **_factors(variant, sizes, device), "eps": 1e-5}


def _rows(variant: Variant, sizes: Sizes, device: str) -> torch.Tensor:
    rows, d, gap = sizes["rows"], sizes["d"], sizes.get("gap", 0)
    x = torch.randn(rows, d + gap, device=device).mul_(2)
    return x.to(DTYPES[variant["scalar_t"]])[:, :d]


def _factors(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    weight = torch.randn(sizes["d"], device=device).add_(1).to(DTYPES[variant["scalar_t"]])
    offset, once = float(sizes.get("offset", 0)), bool(sizes.get("once", 0))
    return {"weight": weight, "weight_offset": offset, "round_once": once}
