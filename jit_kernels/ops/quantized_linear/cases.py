"""The cases on which quantized_gemm is tested and timed."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant
from kiln.jit_kernels.ops.shared.four_bits import CHUNK, pack_codes

FEW_ROWS, MANY_ROWS = 32, 64  # of a block
MOST_ZERO = 16
# With up to 128 inputs, a group of 128 would be one of all.
SIZES: list[Sizes] = [
    {"rows": 1, "outputs": 128, "inputs": 256, "experts": 0},
    {"rows": 19, "outputs": 42, "inputs": 328, "experts": 0, "zeros": 1, "bias": 1, "gap": 6},
    {"rows": 75, "outputs": 131, "inputs": 136, "experts": 0, "zeros": 1},
    {"rows": 34, "outputs": 12, "inputs": 2096, "experts": 0, "zeros": 1, "bias": 1},
    {"rows": 150, "outputs": 130, "inputs": 136, "experts": 7, "zeros": 1, "behind": 2},
    {"rows": 60, "outputs": 20, "inputs": 1064, "experts": 40, "gap": 16},
]
BENCH_SIZES: list[Sizes] = [
    {"rows": rows, "outputs": outputs, "inputs": inputs, "experts": 0}
    for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    for rows in (64, 256, 2048)
]


def padded(inputs: int) -> int:
    """Return for how many inputs a row has codes."""
    return -(-inputs // CHUNK) * CHUNK


def columns_of(variant: Variant, inputs: int) -> int:
    """Return how many scales an output has."""
    group = int(variant["group"])
    return padded(inputs) // group if group else 1


def quantized_gemm_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random x, codes of every value, and scales that give results near 1.

    "experts" is 0 if there are none. ``sizes`` may have "zeros", "bias", "gap" (elements between
    rows; in x rounded up to 8) and "behind" (rows of NaN behind the last expert's). The rows of an
    expert are none, one, or a random number.
    """
    dtype, rows, experts = DTYPES[variant["scalar_t"]], sizes["rows"], sizes["experts"]
    outputs, inputs, gap = sizes["outputs"], sizes["inputs"], sizes.get("gap", 0)
    lead = (experts, outputs) if experts else (outputs,)
    wide = inputs + -(-gap // 8) * 8
    x = torch.randn(rows, wide, dtype=torch.float32, device=device).to(dtype)[:, :inputs]
    codes = torch.randint(0, 16, (*lead, inputs), dtype=torch.uint8, device=device)
    shape = (*lead, columns_of(variant, inputs))
    zeros = ends = None
    if variant["weight"] == "E2M1":
        exponent = 126 - inputs.bit_length() // 2
        scales = torch.randint(exponent - 3, exponent, shape, dtype=torch.uint8, device=device)
    else:
        scales = torch.rand(shape, device=device).add_(0.5).mul_(0.1 / inputs**0.5)
        if sizes.get("zeros"):
            high = MOST_ZERO + 1
            zeros = torch.randint(0, high, shape, dtype=torch.int16, device=device)
    if experts:
        ends = _ends(rows - sizes.get("behind", 0), experts, device)
        x[rows - sizes.get("behind", 0) :] = torch.nan
    bias = torch.randn(outputs, device=device).to(dtype) if sizes.get("bias") else None
    return {
        "out": torch.empty(rows, outputs + gap, dtype=dtype, device=device)[:, :outputs],
        "x": x,
        "codes": pack_codes(codes),
        "scales": scales,
        "zeros": zeros,
        "bias": bias,
        "ends": ends,
        "tile_rows": int(variant["tile_rows"]),
    }


def _ends(rows: int, experts: int, device: str) -> torch.Tensor:
    """Return where the rows of each expert end: the first has all that others do not take."""
    count = torch.zeros(experts, dtype=torch.int32)
    count[1::3] = 1
    chosen = torch.randint(0, experts, (max(rows - int(count.sum()), 0) // 4,))
    count += torch.bincount(chosen, minlength=experts).int()
    ends = count.cumsum(0).clamp(max=rows).int()
    return (ends + rows - ends[-1]).to(device)
