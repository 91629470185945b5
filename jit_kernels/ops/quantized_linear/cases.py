"""The cases on which quantized_gemm is tested and timed."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant
from kiln.jit_kernels.ops.shared.four_bits import CHUNK, pack_codes

FEW_ROWS, MANY_ROWS = 32, 64  # of a block
MOST_ZERO = 16
BITS = MappingProxyType({"U4": 4, "E2M1": 4, "E4M3": 8, "I8": 8})
_BLOCK = 128  # outputs that share scales of 8-bit codes
_ALIGNED = 16  # inputs with 8-bit codes
# With up to 128 inputs, a group of 128 would be one of all.
SIZES: list[Sizes] = [
    {"rows": 1, "outputs": 128, "inputs": 256, "experts": 0},
    {"rows": 19, "outputs": 42, "inputs": 336, "experts": 0, "zeros": 1, "bias": 1, "gap": 6}
    | {"by_row": 1, "more": 3},
    {"rows": 75, "outputs": 131, "inputs": 144, "experts": 0, "zeros": 1},
    {"rows": 34, "outputs": 12, "inputs": 2096, "experts": 0, "zeros": 1, "bias": 1, "by_row": 1},
    {"rows": 150, "outputs": 130, "inputs": 144, "experts": 7, "zeros": 1, "behind": 2},
    {"rows": 60, "outputs": 20, "inputs": 1072, "experts": 40, "gap": 16, "by_row": 1},
]
BENCH_SIZES: list[Sizes] = [
    {"rows": rows, "outputs": outputs, "inputs": inputs, "experts": 0}
    for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    for rows in (64, 256, 2048)
]


def padded(inputs: int) -> int:
    """Return for how many inputs a row has codes."""
    return -(-inputs // CHUNK) * CHUNK


def shape_of_scales(variant: Variant, sizes: Sizes) -> tuple[int, int]:
    """Return the shape of the scales, of each expert if there are any.

    With 8-bit codes 128 outputs share them but for "by_row", and there may be "more" columns.
    """
    outputs, group, bits = sizes["outputs"], int(variant["group"]), BITS[variant["weight"]]
    rows = -(-outputs // _BLOCK) if bits == 8 and not sizes.get("by_row") else outputs
    columns = padded(sizes["inputs"]) // group if group else 1
    return rows, columns + (sizes.get("more", 0) if bits == 8 and group else 0)


def quantized_gemm_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random x, codes of every value but NaN, and scales that give results near 1.

    "experts" is 0 if there are none. ``sizes`` may have "zeros", "bias", "gap" (elements between
    rows; in x rounded up to 8, in 8-bit codes to 16), "by_row" and "more" (see shape_of_scales) and
    "behind" (rows of NaN behind the last expert's). The rows of an expert are none, one, or a
    random number.
    """
    dtype, rows, experts = DTYPES[variant["scalar_t"]], sizes["rows"], sizes["experts"]
    outputs, inputs, gap = sizes["outputs"], sizes["inputs"], sizes.get("gap", 0)
    lead = (experts,) if experts else ()
    wide = inputs + -(-gap // 8) * 8
    x = torch.randn(rows, wide, dtype=torch.float32, device=device).to(dtype)[:, :inputs]
    shape = (*lead, *shape_of_scales(variant, sizes))
    if BITS[variant["weight"]] == 8:
        codes = _bytes(variant["weight"], (*lead, outputs, inputs), gap, device)
    else:
        size = (*lead, outputs, inputs)
        codes = pack_codes(torch.randint(0, 16, size, dtype=torch.uint8, device=device))
    zeros = ends = None
    if variant["weight"] == "E2M1":
        exponent = 126 - inputs.bit_length() // 2
        scales = torch.randint(exponent - 3, exponent, shape, dtype=torch.uint8, device=device)
    else:
        largest = 0.1 if variant["weight"] == "U4" else 0.005
        scales = torch.rand(shape, device=device).add_(0.5).mul_(largest / inputs**0.5)
        if variant["weight"] == "U4" and sizes.get("zeros"):
            high = MOST_ZERO + 1
            zeros = torch.randint(0, high, shape, dtype=torch.int16, device=device)
    if experts:
        ends = _ends(rows - sizes.get("behind", 0), experts, device)
        x[rows - sizes.get("behind", 0) :] = torch.nan
    bias = torch.randn(outputs, device=device).to(dtype) if sizes.get("bias") else None
    return {
        "out": torch.empty(rows, outputs + gap, dtype=dtype, device=device)[:, :outputs],
        "x": x,
        "codes": codes,
        "scales": scales,
        "zeros": zeros,
        "bias": bias,
        "ends": ends,
        "tile_rows": int(variant["tile_rows"]),
    }


def _bytes(weight: str, size: tuple[int, ...], gap: int, device: str) -> torch.Tensor:
    """Return 8-bit codes of every value but NaN. Between rows they are NaN, or -1."""
    *lead, inputs = size
    wide = (*lead, inputs + -(-gap // _ALIGNED) * _ALIGNED)
    codes = torch.randint(0, 256, wide, dtype=torch.uint8, device=device)
    dtype = torch.int8 if weight == "I8" else torch.float8_e4m3fn
    if weight == "E4M3":
        codes[codes & 0x7F == 0x7F] = 0x7E
    codes[..., inputs:] = 0xFF
    return codes.view(dtype)[..., :inputs]


def _ends(rows: int, experts: int, device: str) -> torch.Tensor:
    """Return where the rows of each expert end: the first has all that others do not take."""
    count = torch.zeros(experts, dtype=torch.int32)
    count[1::3] = 1
    chosen = torch.randint(0, experts, (max(rows - int(count.sum()), 0) // 4,))
    count += torch.bincount(chosen, minlength=experts).int()
    ends = count.cumsum(0).clamp(max=rows).int()
    return (ends + rows - ends[-1]).to(device)
