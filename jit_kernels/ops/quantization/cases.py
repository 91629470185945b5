"""The cases on which the kernels that quantise are tested and timed."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant
from kiln.jit_kernels.ops.quantization.codes import QUANT_DTYPES, empty_codes

NUM_MAXIMA = 200  # in the cases of quantize
SIZES: list[Sizes] = [
    {"rows": 0, "d": 64},
    {"rows": 1, "d": 1},
    {"rows": 3, "d": 7, "offset": 1},
    {"rows": 5, "d": 256, "group": 128, "gap": 16, "column_major": 1},
    {"rows": 4, "d": 192, "given": 1, "gap": 8},
    {"rows": 2, "d": 129, "gap": 1},
    {"rows": 3, "d": 2048, "code_gap": 4},
    {"rows": 37, "d": 128, "gap": 3, "group": 128},
    {"rows": 34, "d": 60, "gap": 4, "once": 1},
    {"rows": 5, "d": 128, "group": 128},
    {"rows": 2, "d": 2176, "group": 128, "once": 1},
    {"rows": 2, "d": 4104, "gap": 8, "offset": 1},
    {"rows": 1, "d": 16512, "group": 128},
    {"rows": 1, "d": 16392},
]
QUANTIZE_SIZES: list[Sizes] = [*SIZES, {"rows": 3, "d": 40, "given": 1, "maxima": 1}]
AMAX_SIZES: list[Sizes] = [
    {"rows": rows, "d": d, "gap": gap, "parts": 3}
    for rows, d, gap in [(0, 64, 0), (1, 1, 0), (3, 7, 0), (7, 129, 1), (8, 136, 8), (2, 9000, 8)]
]
_PER_ROW: list[Sizes] = [
    *({"rows": rows, "d": 4096, "group": 0} for rows in (1, 16, 128, 1024, 8192)),
    {"rows": 8192, "d": 8192, "group": 0},
]
BENCH_SIZES = _PER_ROW + [{**sizes, "group": 128} for sizes in _PER_ROW[3:]]
# 4096 x 4096: its time to read 32 MiB is a lower bound for attention to as many bytes.
AMAX_BENCH_SIZES: list[Sizes] = [
    {**sizes, "parts": 256} for sizes in [{**_PER_ROW[-1], "rows": 4096, "d": 4096}, *_PER_ROW]
]


def quantize_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return rows of random numbers, and maxima if the sizes have them."""
    made = {**_codes(variant, sizes, device), "x": _rows(variant, sizes, device), "maxima": None}
    if sizes.get("maxima"):  # the largest is last
        made |= {"scale": None, "maxima": torch.linspace(0.1, 3.0, NUM_MAXIMA, device=device)}
    return made


def tensor_amax_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return rows; each row's largest magnitude is its last element, negative and unique."""
    x = _rows(variant, sizes, device)
    x[:, -1] = -20.0 - torch.arange(x.shape[0], device=device)
    return {"out": torch.empty(sizes["parts"], device=device), "x": x}


def rms_norm_quant_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return rows of random numbers, and a weight near 1."""
    codes, x = _codes(variant, sizes, device), _rows(variant, sizes, device)
    weight = torch.randn(sizes["d"], device=device).add_(1).to(DTYPES[variant["scalar_t"]])
    offset, once = float(sizes.get("offset", 0)), bool(sizes.get("once", 0))
    factors = {"weight": weight, "eps": 1e-6, "weight_offset": offset, "round_once": once}
    return {**codes, "x": x, **factors}


def fused_add_rms_norm_quant_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return rms_norm_quant_inputs and a residual."""
    made = rms_norm_quant_inputs(variant, sizes, device)
    return {**made, "residual": _rows(variant, sizes, device)}


def silu_and_mul_quant_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return rows of random numbers: gate, then up."""
    codes = _codes(variant, sizes, device)
    return {**codes, "x": _rows(variant, sizes, device, width=2)}


def code_bytes(sizes: Sizes) -> int:
    """Return the bytes of the codes and scales of a case."""
    rows, d, group = sizes["rows"], sizes["d"], sizes.get("group", 0)
    count = 1 if sizes.get("given") else rows * (d // group if group else 1)
    return rows * d + 4 * count


def _codes(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return the outputs, a given scale or None, and the group size.

    ``sizes`` may have "gap" (between rows), "code_gap", "group", "given" and "column_major".
    """
    rows, d, group = sizes["rows"], sizes["d"], sizes.get("group", 0)
    scale = torch.tensor([0.02], device=device) if sizes.get("given") else None
    dtype = QUANT_DTYPES[variant["quant_t"]]
    gap = sizes.get("code_gap", sizes.get("gap", 0))
    out = torch.empty(rows, d + gap, dtype=dtype, device=device)[:, :d]
    column_major = bool(sizes.get("column_major"))
    scales = empty_codes((rows, d), device, dtype, group, scale is not None, column_major)[1]
    return {"out": out, "scales": scales, "scale": scale, "group_size": group}


def _rows(variant: Variant, sizes: Sizes, device: str, width: int = 1) -> torch.Tensor:
    rows, d, gap = sizes["rows"], width * sizes["d"], sizes.get("gap", 0)
    x = torch.randn(rows, d + gap, device=device).mul_(2)
    if rows > 1:
        x[1] = 0  # the kernel must not divide by zero
    return x.to(DTYPES[variant["scalar_t"]])[:, :d]
