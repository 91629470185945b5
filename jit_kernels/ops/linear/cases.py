"""The cases on which skinny_gemm is tested and timed."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant
from kiln.jit_kernels.ops.linear.reference import BLOCK

MOST_ROWS = 8  # of a tile
# "rows" counts the rows of the last tile of 8; with two tiles there are 8 more. If weights are fp8,
# "inputs" is rounded up to the next multiple that the kernel takes.
SIZES: list[Sizes] = [
    {"rows": 1, "outputs": 16, "inputs": 64},
    {"rows": 3, "outputs": 40, "inputs": 1280, "bias": 1, "gap": 8},
    {"rows": 8, "outputs": 12, "inputs": 4200},
    {"rows": 5, "outputs": 33, "inputs": 333, "bias": 1},
    {"rows": 2, "outputs": 150, "inputs": 200, "gap": 3},
    {"rows": 4, "outputs": 260, "inputs": 512, "by_row": 1},
    {"rows": 7, "outputs": 5, "inputs": 3},
]
BENCH_SIZES: list[Sizes] = [
    {"rows": rows, "outputs": outputs, "inputs": inputs}
    for outputs, inputs in (
        *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
        *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    )
    for rows in (1, 8)
]


def shape_of_x(variant: Variant, sizes: Sizes) -> tuple[int, int]:
    """Return the rows and inputs of a case of a variant."""
    step = {"kNone": 1, "kByOutput": BLOCK // 2, "kByBlock": BLOCK}[variant["scaled"]]
    rows = sizes["rows"] + MOST_ROWS * (int(variant["tiles"]) - 1)
    return rows, -(-sizes["inputs"] // step) * step


def skinny_gemm_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random x and weights of a variant.

    ``sizes`` may have "bias", "gap" (elements between rows; codes: 16 times as many), and "by_row"
    (scales of blocks for each output, and those of a row of x side by side in memory).
    """
    dtype = DTYPES[variant["scalar_t"]]
    rows, inputs = shape_of_x(variant, sizes)
    outputs, gap = sizes["outputs"], sizes.get("gap", 0)
    is_coded, blocks = variant["weight"] == "E4M3", variant["scaled"] == "kByBlock"
    x = torch.randn(rows, inputs + gap, dtype=torch.float32, device=device)
    weight = torch.randn(outputs, inputs + gap, device=device) / inputs**0.5
    columns = inputs // BLOCK if blocks else 1
    scales = x_scales = None
    if is_coded:
        weight = _codes(outputs, inputs + 16 * gap, device)
        by_row = not blocks or sizes.get("by_row")
        scale_rows = outputs if by_row else -(-outputs // BLOCK)
        # A column more than there are blocks, as torch's product wants scales.
        scales = _scales(scale_rows, columns + blocks, device) / inputs**0.5
    x = x.to(dtype)
    if variant["input"] == "E4M3":
        x = _codes(rows, inputs + 16 * gap, device)
        by_row = sizes.get("by_row")
        x_scales = _scales(rows, columns, device) if by_row else _scales(columns, rows, device).T
    return {
        "out": torch.empty(rows, outputs + gap, dtype=dtype, device=device)[:, :outputs],
        "x": x[:, :inputs],
        "weight": (weight if is_coded else weight.to(dtype))[:, :inputs],
        "x_scales": x_scales,
        "scales": scales,
        "bias": torch.randn(outputs, device=device).to(dtype) if sizes.get("bias") else None,
    }


def _codes(rows: int, columns: int, device: str) -> torch.Tensor:
    """Return random codes near 1, and some of every other value but those that are no numbers."""
    codes = torch.randn(rows, columns, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
    every = torch.randint(0, 256, codes.shape, dtype=torch.uint8, device=device)
    rare = torch.rand(codes.shape, device=device) < 0.01
    codes = codes.where(~(rare & (every % 128 < 112)), every)  # below 32
    return codes.view(torch.float8_e4m3fn)


def _scales(rows: int, columns: int, device: str) -> torch.Tensor:
    return torch.rand(rows, columns, device=device) + 0.5
