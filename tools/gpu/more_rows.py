"""Products of more than a few rows with 4- and 8-bit weights: quantized_gemm beside torch's ways.

Those are to dequantise and multiply, and to multiply by weights that are bf16 all along.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping

import torch

from gpu.few_rows import LARGE, OF_4_BITS, Make, bytes_of, cold_copies
from gpu.pace import Pace, Row
from gpu.quantised import BOUNDS
from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.models.fp8_schemes import BlockFP8, ChannelFP8
from kiln.jit_kernels.bench.ceilings import work_on
from kiln.jit_kernels.bench.timing import Call, time_side_by_side
from kiln.jit_kernels.ops.quantized_linear.functions import quantized_gemm

ROWS, FEWER_ROWS = (32, 64, 128), (32, 64)  # the second with 8-bit weights
OF_8_BITS: Mapping[str, Make] = {
    "fp8 channel, weights only": ChannelFP8("channel", "none").quantized,
    "fp8 block, weights only": BlockFP8("", rounds=False).quantized,
    "int8 channel, weights only": ChannelFP8("channel", "none", torch.int8).quantized,
}
FORMS: Mapping[str, Make] = {**OF_4_BITS, **OF_8_BITS}
_ROUNDS = 30


def products(args: argparse.Namespace) -> list[Row]:
    """Return one row per form, size and number of rows: microseconds, and whether it is right."""
    cases = [(form, size) for form in FORMS for size in LARGE]

    def rows_of(case: tuple[str, tuple[int, int]]) -> Iterable[Row]:
        return rows_of_form(*case, "cuda")

    return Pace(args, seconds=90).rows(cases, lambda case: f"{case[0]} {case[1]}", rows_of)


def rows_of_form(form: str, size: tuple[int, int], device: str) -> list[Row]:
    """Return the rows of one form and size; ``error``: of the worst row, relative to its length.

    ``ok``: torch's result is as near as rounding lets it be, and each row has the bits that it has
    alone.
    """
    torch.manual_seed(0)
    values = torch.randn(size, device=device).mul_(0.02).bfloat16()
    copies, dense = cold_copies(FORMS[form](values)), cold_copies(DenseWeight(values))
    found = []
    for rows in FEWER_ROWS if form in OF_8_BITS else ROWS:
        x = torch.randn(rows, size[1], device=device).bfloat16()
        out, wanted = multiplied(copies[0], x, _kernel), multiplied(copies[0], x, _torch)
        error = worst_row(out, wanted)
        row: Row = {"form": form, "outputs": size[0], "inputs": size[1], "rows": rows}
        row["mb"] = round(bytes_of(copies[0]) / 1e6, 1)
        row["error"] = error
        row["ok"] = error < BOUNDS[x.dtype] and _has_bits_of_rows_alone(copies[0], x, out)
        found.append(row | _times(copies, dense, x))
    return found


Multiply = Callable[[Weight, torch.Tensor, torch.Tensor], None]  # weights, x and out


def _kernel(weight: Weight, x: torch.Tensor, out: torch.Tensor) -> None:
    codes, scales, *more = weight.tensors[:3]
    assert codes is not None
    assert scales is not None
    quantized_gemm(x, codes, scales, out, *more)


def _torch(weight: Weight, x: torch.Tensor, out: torch.Tensor) -> None:
    Weight.product(weight, x, out, None)


def multiplied(weight: Weight, x: torch.Tensor, multiply: Multiply) -> torch.Tensor:
    """Return a product; what is not written is NaN."""
    out = x.new_full((len(x), weight.out_features), torch.nan)
    multiply(weight, x, out)
    return out


def worst_row(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference of two rows, relative to the length of the second."""
    wide = wanted.double()
    return float(((out.double() - wide).norm(dim=1) / wide.norm(dim=1)).max())


def _has_bits_of_rows_alone(weight: Weight, x: torch.Tensor, out: torch.Tensor) -> bool:
    alone = [multiplied(weight, x[row : row + 1], _kernel) for row in range(len(x))]
    return torch.equal(out, torch.cat(alone))


def _times(copies: list[Weight], dense: list[Weight], x: torch.Tensor) -> Row:
    """Return the microseconds of each way; torch's first one reads one copy, as it is slow."""
    out = x.new_empty(len(x), copies[0].out_features)

    def calls(weights: list[Weight], multiply: Multiply) -> list[Call]:
        return [lambda one=one: multiply(one, x, out) for one in weights]  # type: ignore[misc]

    def floats(weight: Weight, x: torch.Tensor, out: torch.Tensor) -> None:
        assert isinstance(weight, DenseWeight)
        torch.mm(x, weight.values.T, out=out)

    make = work_on(x.device.type)
    works = {
        "kernel": make(calls(copies, _kernel)),
        "torch": make(calls(copies[:1], _torch)),
        "bf16": make(calls(dense, floats)),
    }
    times = time_side_by_side(works, max_rounds=_ROUNDS)
    found: Row = {f"{name}_us": round(one.median_us, 2) for name, one in times.items()}
    found["speed"] = round(times["torch"].median_us / times["kernel"].median_us, 2)
    found["of_bf16"] = round(times["bf16"].median_us / times["kernel"].median_us, 2)
    return found
