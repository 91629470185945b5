"""Products of quantised weights of an 8B's sizes: right, and timed beside those of floats."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gpu.pace import Pace, Row
from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.models.fp8_schemes import BlockFP8, ChannelFP8
from kiln.engine.models.group_schemes import quantized_by_group
from kiln.jit_kernels.bench.timing import GpuWork, time_side_by_side

# Outputs and inputs: of Llama-3-8B, and small ones that not all of torch's products take.
SIZES = [(6144, 4096), (28672, 4096), (4096, 14336), (192, 256), (96, 2880), (20, 136)]
ROWS = (1, 3, 16, 17, 64, 256, 1000)
_TIMED_ROWS, _TIMED_OUTPUTS = (1, 64, 1000), 4096
_CHECKED = 64  # rows that are compared in float64
# Four times the rounding of inputs, weights and sums, relative to the length of a row; the worst
# of thousands of rows is at a half.
BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
_INT8 = torch.int8
FORMS: Mapping[str, Callable[[torch.Tensor], Weight]] = {
    "fp8 channel, token": ChannelFP8("channel", "token").quantized,
    "fp8 channel, static": ChannelFP8("channel", "static").quantized,
    "fp8 channel, weights only": ChannelFP8("channel", "none").quantized,
    "int8 channel, token": ChannelFP8("channel", "token", _INT8).quantized,
    "fp8 block, groups of 128": BlockFP8("").quantized,
    "fp8 block, weights only": BlockFP8("", rounds=False).quantized,
    "int4, groups of 128": lambda values: quantized_by_group(values, 4, 128, asymmetric=False),
    "int4, groups of 32, zero points": lambda values: quantized_by_group(
        values, 4, 32, asymmetric=True
    ),
    "int8, groups of 128": lambda values: quantized_by_group(values, 8, 128, asymmetric=False),
}


def products(args: argparse.Namespace) -> list[Row]:
    """Return one row per form, size and dtype: the largest error, and microseconds."""
    cases = [(form, size, dtype) for size in SIZES for dtype in BOUNDS for form in FORMS]

    def rows_of(case: tuple[str, tuple[int, int], torch.dtype]) -> Iterable[Row]:
        return [product_row(*case, "cuda")]

    return Pace(args, seconds=80).rows(cases, lambda case: f"{case[0]} {case[1]}", rows_of)


def product_row(form: str, size: tuple[int, int], dtype: torch.dtype, device: str) -> Row:
    """Return a row for one form; ``error``: of the worst row, relative to its length."""
    torch.manual_seed(0)
    values = torch.randn(size, dtype=torch.float32, device=device).mul_(0.02).to(dtype)
    weight = FORMS[form](values)
    errors = {rows: _error(weight, rows, size, dtype) for rows in ROWS}
    row: Row = {
        "form": form,
        "outputs": size[0],
        "inputs": size[1],
        "dtype": str(dtype).removeprefix("torch."),
        "kept": weight.describe(),
        "error": max(errors.values()),
        "ok": max(errors.values()) < BOUNDS[dtype],
    }
    if size[0] >= _TIMED_OUTPUTS and dtype == torch.bfloat16 and device == "cuda":
        row |= _times(weight, DenseWeight(values))
    return row


def _error(weight: Weight, num_rows: int, size: tuple[int, int], dtype: torch.dtype) -> float:
    """Return the largest relative error of a row, against float64 on the same rounded inputs."""
    outputs, inputs = size
    x = torch.randn(num_rows, inputs, device=weight.device).to(dtype)
    out = torch.full((num_rows, outputs), torch.nan, dtype=dtype, device=weight.device)
    weight.product(x, out, None)
    wide = weight.activations(x[:_CHECKED].float()).double()
    exact = wide @ weight.dequantized(slice(None), torch.float32).double().T
    wrong = (out[:_CHECKED].double() - exact).norm(dim=1) / exact.norm(dim=1)
    return float(wrong.max())


def _times(weight: Weight, dense: Weight) -> dict[str, Any]:
    """Return the microseconds of products with few and many rows, and those of floats."""
    found: dict[str, Any] = {}
    inputs = dense.dequantized(slice(1), torch.bfloat16).shape[1]
    for rows in _TIMED_ROWS:
        x = torch.randn(rows, inputs, device=weight.device).bfloat16()
        out = x.new_empty(rows, weight.out_features)
        works = {
            name: GpuWork([lambda one=one, x=x, out=out: one.product(x, out, None)])
            for name, one in (("us", weight), ("floats_us", dense))
        }
        times = time_side_by_side(works)
        found |= {f"{name}_{rows}": round(one.median_us, 1) for name, one in times.items()}
    return found
