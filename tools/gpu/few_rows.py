"""Products of a few rows: Kiln's kernel beside others, and the bits of a row alone.

The others are torch's products, the kernel's Triton form and, for some sizes in bf16, what Inductor
makes of x @ w.T: a reduction if x is one row, a call of cuBLAS if it is more. For weights of 4 bits
torch's way is to dequantise them first, and there is no Triton form.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gpu.pace import Pace, Row
from kiln.engine.layers.block_weight import BlockGroupWeight, BlockWeight
from kiln.engine.layers.channel_weight import ChannelWeight, TokenWeight
from kiln.engine.layers.group_weight import Group4Weight
from kiln.engine.layers.mxfp4_weight import MXFP4Weight
from kiln.engine.layers.scaled_products import multiply_blocks, multiply_rows
from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.models.fp8_schemes import BlockFP8, ChannelFP8
from kiln.engine.models.group_schemes import quantized_by_group
from kiln.engine.models.mxfp4_scheme import StackedMXFP4
from kiln.jit_kernels.bench.ceilings import measure_ceilings, work_on
from kiln.jit_kernels.bench.timing import Call, time_side_by_side
from kiln.jit_kernels.ops.linear.checks import MOST_ROWS, tiles_for
from kiln.jit_kernels.ops.linear.functions import skinny_gemm
from kiln.jit_kernels.ops.linear.spec import SKINNY_GEMM
from kiln.jit_kernels.ops.quantization.functions import quantize_per_group
from kiln.jit_kernels.registry import triton_form

# Outputs and inputs of qkv, o, gate_up and down: of Qwen3-0.6B and of Llama-3-8B.
SMALL = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
LARGE = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
OF_OCTETS = tuple(size for size in LARGE if size != (4096, 4096))
ROWS = (1, 8, MOST_ROWS)
FEW_ROWS = (1, 8)  # of these, Triton and Inductor are timed, which compile for seconds
COMPILED = ((4096, 1024), (4096, 4096))  # sizes that Inductor compiles
# Without it, Inductor calls cuBLAS for one row too.
_OPTIONS = {"coordinate_descent_tuning": True}
_ROUNDS = 30
_COLD_BYTES, _MOST_COPIES = 2**28, 40  # of weights that the products of a graph read in turn
Make = Callable[[torch.Tensor], Weight]
OF_4_BITS: Mapping[str, Make] = {
    "int4 group of 128, zero points": lambda values: quantized_by_group(
        values, 4, 128, asymmetric=True
    ),
    "mxfp4": StackedMXFP4().quantized,
}
FORMS: Mapping[str, Make] = {
    "bf16": DenseWeight,
    "fp8 channel, weights only": ChannelFP8("channel", "none").quantized,
    "fp8 channel, token": ChannelFP8("channel", "token").quantized,
    "int8 channel, weights only": ChannelFP8("channel", "none", torch.int8).quantized,
    "int8 channel, token": ChannelFP8("channel", "token", torch.int8).quantized,
    "fp8 block, weights only": BlockFP8("", rounds=False).quantized,
    "fp8 block, groups of 128": BlockFP8("").quantized,
    **OF_4_BITS,
}


def products(args: argparse.Namespace) -> list[Row]:
    """Return one row per form, size and number of rows: microseconds, and whether bits agree."""
    copied = measure_ceilings("cuda").copy_bytes_s
    cases = [("bf16", size) for size in (*LARGE, *SMALL)]
    octets = [form for form in FORMS if form.startswith(("fp8", "int8"))]
    cases += [(form, size) for form in octets for size in OF_OCTETS]
    cases += [(form, size) for form in OF_4_BITS for size in LARGE]

    def rows_of(case: tuple[str, tuple[int, int]]) -> Iterable[Row]:
        return rows_of_form(*case, "cuda", copied)

    return Pace(args, seconds=60).rows(cases, lambda case: f"{case[0]} {case[1]}", rows_of)


def rows_of_form(form: str, size: tuple[int, int], device: str, copied: float) -> list[Row]:
    """Return the rows of one form and size; ``copied``: bytes per second of a copy."""
    torch.manual_seed(0)
    values = torch.randn(size, device=device).mul_(0.02).bfloat16()
    weight = FORMS[form](values)
    moved, copies = bytes_of(weight), cold_copies(weight)
    x = torch.randn(MOST_ROWS, size[1], device=device).bfloat16()
    compared = ("kernel",) if form in OF_4_BITS else ("kernel", "triton")
    is_alone = all(_has_bits_of_rows_alone(weight, x, name) for name in compared)
    found = []
    for rows in ROWS:
        row: Row = {"form": form, "outputs": size[0], "inputs": size[1], "rows": rows}
        row["mb"] = round(moved / 1e6, 1)
        row["ok"] = is_alone
        found.append(row | _times(copies, x[:rows], moved / copied * 1e6))
    return found


def bytes_of(weight: Weight) -> int:
    """Return the bytes of weights with what belongs to them."""
    return sum(one.nbytes for one in weight.tensors if one is not None)


def cold_copies(weight: Weight) -> list[Weight]:
    """Return weights and, on a GPU, so many copies that their bytes have left its cache in turn."""
    copies, wanted = [weight], min(_MOST_COPIES, -(-_COLD_BYTES // bytes_of(weight)))
    while weight.device.type == "cuda" and len(copies) < wanted:
        copies.append(copy.deepcopy(weight))
    return copies


def _has_bits_of_rows_alone(weight: Weight, x: torch.Tensor, name: str) -> bool:
    """Whether a call gives each row the bits that it has alone."""
    alone = [_run(weight, x[row : row + 1], name) for row in range(len(x))]
    return torch.equal(_run(weight, x, name), torch.cat(alone))


def _run(weight: Weight, x: torch.Tensor, name: str) -> torch.Tensor:
    out = x.new_full((len(x), weight.out_features), torch.nan)
    _calls(weight, x, out)[name]()
    return out


def _times(copies: list[Weight], x: torch.Tensor, floor: float) -> dict[str, Any]:
    """Return the microseconds of a product, and the share of a copy's bandwidth."""
    out = x.new_empty(len(x), copies[0].out_features)
    calls = [_calls(one, x, out) for one in copies]
    timed = [name for name in calls[0] if name in ("kernel", "torch") or len(x) in FEW_ROWS]
    works = {}
    for name in timed:
        # To dequantise is slow, and what it writes leaves no codes in the cache: one copy will do.
        is_slow = name == "torch" and isinstance(copies[0], Group4Weight | MXFP4Weight)
        works[name] = work_on(x.device.type)([own[name] for own in calls[: 1 if is_slow else None]])
    times = {
        name: one.median_us for name, one in time_side_by_side(works, max_rounds=_ROUNDS).items()
    }
    return {
        **{f"{name}_us": round(one, 2) for name, one in times.items()},
        "of_copy": round(floor / times["kernel"], 2),
        "speed": round(times["torch"] / times["kernel"], 2),
    }


def _calls(weight: Weight, x: torch.Tensor, out: torch.Tensor) -> dict[str, Call]:
    """Return the product by each of them; the rounding of x to groups is in all."""
    if isinstance(weight, DenseWeight):
        values = weight.values
        calls = {**_kernels(x, values, out), "torch": lambda: torch.mm(x, values.T, out=out)}
        if values.shape in COMPILED:
            calls["inductor"] = lambda: _compiled()(x, values)
        return calls
    if isinstance(weight, Group4Weight | MXFP4Weight):
        four, scales, *zeros = weight.tensors[:3]
        assert four is not None
        own_zeros = zeros[0] if zeros else None
        return {
            "kernel": lambda: skinny_gemm(x, four, out, scales=scales, zeros=own_zeros),
            "torch": lambda: Weight.product(weight, x, out, None),
        }
    assert isinstance(weight, ChannelWeight | BlockWeight)
    codes, scales = weight.codes, weight.scales
    if isinstance(weight, TokenWeight):
        own, x_scales = weight.rounded(x, None)
        return {
            **_kernels(own, codes, out, scales, x_scales),
            "torch": lambda: multiply_rows(own, x_scales, codes, scales, out),
        }
    if isinstance(weight, BlockGroupWeight):

        def call(name: str) -> None:
            own, x_scales = quantize_per_group(x)
            _kernels(own, codes, out, scales, x_scales)[name]()

        return {
            "kernel": lambda: call("kernel"),
            "triton": lambda: call("triton"),
            "torch": lambda: multiply_blocks(
                *quantize_per_group(x, column_major_scales=True), codes, scales, out
            ),
        }
    return {
        **_kernels(x, codes, out, scales),
        "torch": lambda: Weight.product(weight, x, out, None),
    }


def _kernels(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
) -> dict[str, Call]:
    """Return the product by Kiln's kernel and by its Triton form."""
    a = SKINNY_GEMM.parameters.Arguments(
        out=out,
        x=x,
        weight=weight,
        x_scales=x_scales,
        scales=scales,
        zeros=None,
        bias=None,
        expert_of=None,
        ends=None,
        tiles=tiles_for(len(x), 0),
    )
    form = triton_form(SKINNY_GEMM.family, SKINNY_GEMM.name, SKINNY_GEMM.bind(a).variant)
    return {
        "kernel": lambda: skinny_gemm(x, weight, out, scales=scales, x_scales=x_scales),
        "triton": lambda: form(a),
    }


@functools.cache
def _compiled() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return torch.compile(lambda x, weight: x @ weight.T, dynamic=False, options=_OPTIONS)
