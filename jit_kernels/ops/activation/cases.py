"""The cases on which the gated activations are tested and timed."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant

SIZES = [
    {"rows": rows, "d": d, "gap": gap}
    for rows, d, gap in [
        (0, 64, 0), (1, 1, 0), (3, 7, 0), (2, 129, 1), (5, 256, 8), (1, 2056, 0), (2, 4099, 3),
        (3, 64, 3), (2, 2048, 0), (1, 2052, 0),
    ]
] + [{"rows": 9, "d": 60, "gap": 8, "out_gap": 4}]  # fmt: skip
BENCH_SIZES = [{"rows": rows, "d": 14336} for rows in (1, 16, 128, 1024, 8192)]
CLAMPED_BENCH_SIZES = [{"rows": rows, "d": 2880} for rows in (4, 64, 512, 4096, 32768)]  # gpt-oss


def act_and_mul_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, torch.Tensor]:
    """Return rows of random numbers, with gaps between the rows if the sizes have a "gap"."""
    dtype = DTYPES[variant["scalar_t"]]
    rows, d, gap = sizes["rows"], sizes["d"], sizes.get("gap", 0)
    x = torch.randn(rows, 2 * d + gap, device=device).mul_(3).to(dtype)[:, : 2 * d]
    gap = sizes.get("out_gap", gap)
    return {"x": x, "out": torch.empty(rows, d + gap, device=device, dtype=dtype)[:, :d]}


def clamped_swiglu_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return the same with gpt-oss's factor and a limit that a third of the numbers exceed."""
    return {**act_and_mul_inputs(variant, sizes, device), "alpha": 1.702, "limit": 3.0}
