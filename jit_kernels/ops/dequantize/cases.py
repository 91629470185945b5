"""The cases on which dequantize is tested and timed."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant
from kiln.jit_kernels.ops.dequantize.reference import ROW_BLOCK

BITS = MappingProxyType({"U4": 4, "E2M1": 4, "U8": 8, "S8": 8, "E4M3": 8})
SIZES: list[Sizes] = [
    {"rows": 0, "d": 128},
    {"rows": 1, "d": 128},
    {"rows": 5, "d": 384, "group": 32, "zeros": 1},
    {"rows": 3, "d": 128, "group": 4, "zeros": 1},
    {"rows": 6, "d": 384, "group": 24, "zeros": 1},
    {"rows": 7, "d": 256, "group": 16, "first": 3, "more": 2},
    {"rows": 4, "d": 384, "group": 8, "order": 1, "zeros": 1},
    {"rows": 9, "d": 2944, "group": 32, "experts": 3, "first": 1},
    {"rows": 4, "d": 128, "group": 16, "order": 1, "experts": 2, "zeros": 1, "more": 1},
    {"rows": 300, "d": 384, "group": 128, "first": 100, "row_block": 1, "padded": 1, "experts": 2},
]
BENCH_SIZES: list[Sizes] = [
    {"rows": 4096, "d": 4096, "group": 128},
    {"rows": 4096, "d": 14336, "group": 128, "zeros": 1},
]


def shapes(sizes: Sizes) -> tuple[int, int, int]:
    """Return the rows of codes and of scales of one expert, and the columns of scales."""
    rows = sizes["rows"] // sizes.get("experts", 1)
    all_rows = rows + sizes.get("first", 0) + sizes.get("more", 0)
    d = sizes["d"]
    columns = -(-d // sizes.get("group", d)) + sizes.get("padded", 0)
    return all_rows, -(-all_rows // ROW_BLOCK) if sizes.get("row_block") else all_rows, columns


def has_zeros(variant: Variant, sizes: Sizes) -> bool:
    """Whether a case has zero points."""
    return bool(sizes.get("zeros")) and variant["code"] in ("U4", "U8")


def dequantize_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return random codes of every value, and scales near 0.01.

    "rows" are those of all experts. ``sizes`` may have "experts", "first" and "more" (rows ahead
    and behind), "group" (default: d), "zeros", "order" (a group for each input), "row_block" and
    "padded" (columns behind).
    """
    d, experts, kind = sizes["d"], sizes.get("experts", 1), variant["code"]
    all_rows, scale_rows, columns = shapes(sizes)
    octets = (experts, all_rows, d * BITS[kind] // 8)
    codes = torch.randint(0, 256, octets, dtype=torch.uint8, device=device)
    if kind == "E4M3":  # without the codes that are no numbers
        codes = codes.where(codes % 128 != 127, 0).view(torch.float8_e4m3fn)
    shape = (experts, scale_rows, columns)
    if kind == "E2M1":  # the smallest and the largest exponent, too
        scales = torch.randint(100, 140, shape, dtype=torch.uint8, device=device)
        scales.view(-1)[:2] = torch.tensor([0, 254], dtype=torch.uint8)[: scales.numel()]
    else:
        scales = torch.rand(shape, device=device).add_(0.5).mul_(0.01)
    zeros = group_of = None
    if has_zeros(variant, sizes):
        most = 17 if kind == "U4" else 257
        zeros = torch.randint(0, most, shape, dtype=torch.int16, device=device)
    if sizes.get("order"):
        group_of = torch.randint(0, columns, (experts, d), dtype=torch.int32, device=device)
    return {
        "out": torch.empty(
            experts,
            sizes["rows"] // experts,
            d,
            dtype=DTYPES[variant["scalar_t"]],
            device=device,
        ),
        "codes": codes.view(torch.int8) if kind == "S8" else codes,
        "scales": scales,
        "zeros": zeros,
        "group_of": group_of,
        "first": sizes.get("first", 0),
        "group_size": sizes.get("group", d),
        "zero": {"U4": 8, "U8": 128}.get(kind, 0) if zeros is None else 0,
    }
