"""The cases on which skinny_gemm is tested and timed."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant
from kiln.jit_kernels.ops.linear.checks import TILE_ROWS
from kiln.jit_kernels.ops.linear.reference import BLOCK
from kiln.jit_kernels.ops.shared.four_bits import CHUNK, pack_codes

# The bits of a weight's code; 0: of the dtype.
BITS = MappingProxyType({"Plain": 0, "E4M3": 8, "I8": 8, "U4": 4, "E2M1": 4})
_STEPS = MappingProxyType({"E4M3": 1, "I8": 64})  # what codes are divided by, to be near 1
_GROUPS = MappingProxyType({"kByBlock": 128, "kBy64": 64, "kBy32": 32})  # inputs of a scale
# "rows" counts the rows of the last tile of 8; with two tiles there are 8 more. Beside codes,
# "inputs" is rounded up to the next multiple that the kernel takes. Of variants with experts, the
# rows are "grouped", and "experts" get them at random. 390 outputs are so many that blocks of the
# simulated GPU go on to further ones of 4-bit codes.
SIZES: list[Sizes] = [
    {"rows": 1, "outputs": 16, "inputs": 64, "grouped": 1, "experts": 1},
    {"rows": 3, "outputs": 40, "inputs": 1280, "bias": 1, "gap": 8, "zeros": 1, "grouped": 21,
     "experts": 5},
    {"rows": 8, "outputs": 12, "inputs": 4200, "grouped": 3, "experts": 40},
    {"rows": 5, "outputs": 33, "inputs": 333, "bias": 1, "zeros": 1, "grouped": 37, "experts": 2},
    {"rows": 2, "outputs": 150, "inputs": 200, "gap": 3, "grouped": 12, "experts": 12},
    {"rows": 4, "outputs": 390, "inputs": 512, "bias": 1, "zeros": 1, "by_row": 1, "grouped": 6,
     "experts": 3},
    {"rows": 7, "outputs": 5, "inputs": 3, "grouped": 50, "experts": 1},
]  # fmt: skip
BENCH_SIZES: list[Sizes] = [
    {"rows": rows, "outputs": outputs, "inputs": inputs, "grouped": 8 * rows, "experts": 8}
    for outputs, inputs in (
        *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
        *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    )
    for rows in (1, 8)
]


def has_zeros(variant: Variant, sizes: Sizes) -> bool:
    """Whether a case has zero points."""
    return bool(sizes.get("zeros")) and variant["weight"] == "U4"


def padded(variant: Variant, inputs: int) -> int:
    """Return the inputs of a row of weights, with those behind."""
    return -(-inputs // CHUNK) * CHUNK if BITS[variant["weight"]] == 4 else inputs


def shape_of_x(variant: Variant, sizes: Sizes) -> tuple[int, int]:
    """Return the rows and inputs of a case of a variant."""
    is_octet = BITS[variant["weight"]] == 8
    steps = {"kByOutput": BLOCK // 2, "kByBlock": BLOCK} if is_octet else {}
    step = steps.get(variant["scaled"], 1 if variant["weight"] == "Plain" else 8)
    inputs = -(-sizes["inputs"] // step) * step
    if BITS[variant["weight"]] == 4 and variant["scaled"] == "kByBlock":
        inputs += CHUNK  # one block would be a scale for each output
    if variant["experts"] == "true":
        return sizes["grouped"], inputs
    return sizes["rows"] + TILE_ROWS * (int(variant["tiles"]) - 1), inputs


def experts_of(variant: Variant, sizes: Sizes) -> int:
    """Return the experts of a case; 1 without."""
    return sizes["experts"] if variant["experts"] == "true" else 1


def shape_of_scales(variant: Variant, sizes: Sizes) -> tuple[int, int]:
    """Return the rows and columns of the scales of a case; none without codes."""
    scaled, outputs = variant["scaled"], sizes["outputs"]
    inputs = padded(variant, shape_of_x(variant, sizes)[1])
    if scaled in ("kNone", "kByOutput"):
        return (outputs, 1) if scaled == "kByOutput" else (0, 0)
    columns = inputs // _GROUPS[scaled]
    if variant["weight"] != "E4M3":
        return outputs, columns
    # A column more than there are blocks, as torch's product wants scales.
    return outputs if sizes.get("by_row") else -(-outputs // BLOCK), columns + 1


def skinny_gemm_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random x and weights of a variant.

    ``sizes`` may have "bias", "gap" (elements between rows; 8 times as many of x beside codes, 16
    times as many codes of 8 bits),
    "zeros" (zero points), "grouped", and "by_row" (scales of blocks for each output, and those of a
    row of x side by side in memory).
    """
    dtype = DTYPES[variant["scalar_t"]]
    rows, inputs = shape_of_x(variant, sizes)
    outputs, gap, lead = sizes["outputs"], sizes.get("gap", 0), [experts_of(variant, sizes)]
    wide = inputs + gap * (1 if variant["weight"] == "Plain" else 8)
    x = torch.randn(rows, wide, dtype=torch.float32, device=device).to(dtype)
    x_scales = expert_of = ends = None
    if variant["input"] != "Plain":
        x, by_row = _octets(rows, inputs + 16 * gap, variant["input"], device), sizes.get("by_row")
        columns = inputs // BLOCK if variant["scaled"] == "kByBlock" else 1
        x_scales = _scales(rows, columns, device) if by_row else _scales(columns, rows, device).T
        x_scales = x_scales / _STEPS[variant["input"]]
    weight, scales, zeros = _weights(variant, sizes, lead[0], device)
    bias = torch.randn(*lead, outputs, device=device).to(dtype) if sizes.get("bias") else None
    if variant["experts"] == "true":
        expert_of = torch.randint(0, lead[0], (rows,), dtype=torch.int32, device=device).sort()[0]
        of_each = torch.bincount(expert_of, minlength=lead[0])
        ends = of_each.cumsum(0, dtype=torch.int32)
    else:
        weight = weight[0]
        scales, zeros, bias = (None if one is None else one[0] for one in (scales, zeros, bias))
    return {
        "out": torch.empty(rows, outputs + gap, dtype=dtype, device=device)[:, :outputs],
        "x": x[:, :inputs],
        "weight": weight,
        "x_scales": x_scales,
        "scales": scales,
        "zeros": zeros,
        "bias": bias,
        "expert_of": expert_of,
        "ends": ends,
        "tiles": int(variant["tiles"]),
    }


def twice_the_outputs(sizes: Sizes) -> Sizes:
    """Return the sizes of gates and ups together; ``sizes`` count one of them."""
    return {**sizes, "outputs": 2 * sizes["outputs"]}


def gated_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random x, and weights of gates and then of ups; out is strided if there is a gap."""
    made = skinny_gemm_inputs(variant, twice_the_outputs(sizes), device)
    outputs, gap = sizes["outputs"], sizes.get("gap", 0)
    return {**made, "out": made["out"].new_empty(len(made["x"]), outputs + gap)[:, :outputs]}


def _weights(
    variant: Variant, sizes: Sizes, experts: int, device: str
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return weights, scales and zero points with a dimension of experts in front."""
    kind, outputs, gap = variant["weight"], sizes["outputs"], sizes.get("gap", 0)
    inputs = shape_of_x(variant, sizes)[1]
    shape = (experts, *shape_of_scales(variant, sizes))
    if kind == "Plain":
        values = torch.randn(experts, outputs, inputs + gap, device=device) / inputs**0.5
        return values.to(DTYPES[variant["scalar_t"]])[..., :inputs], None, None
    scales = _scales(experts * shape[1], shape[2], device).view(shape) / inputs**0.5
    if BITS[kind] == 8:
        octets = _octets(experts * outputs, inputs + 16 * gap, kind, device)
        return octets.view(experts, outputs, -1)[..., :inputs], scales / _STEPS[kind], None
    codes = torch.randint(0, 16, (experts, outputs, inputs), dtype=torch.uint8, device=device)
    zeros = None
    if kind == "E2M1":
        scales = torch.randint(110, 128, shape, dtype=torch.uint8, device=device)
        scales.view(-1)[:2] = torch.tensor([0, 130], dtype=torch.uint8)
    elif has_zeros(variant, sizes):
        zeros = torch.randint(0, 17, shape, dtype=torch.int16, device=device)
    return pack_codes(codes), scales, zeros


def _octets(rows: int, columns: int, kind: str, device: str) -> torch.Tensor:
    """Return random int8, or e4m3 near 1 and some of every other value that is a number."""
    if kind == "I8":
        return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device)
    codes = torch.randn(rows, columns, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
    every = torch.randint(0, 256, codes.shape, dtype=torch.uint8, device=device)
    rare = torch.rand(codes.shape, device=device) < 0.01
    codes = codes.where(~(rare & (every % 128 < 112)), every)  # below 32
    return codes.view(torch.float8_e4m3fn)


def _scales(rows: int, columns: int, device: str) -> torch.Tensor:
    return torch.rand(rows, columns, device=device) + 0.5
