"""Products of rows with their experts' weights: Kiln's kernels beside torch's grouped_mm.

grouped_mm takes floats only. So the quantised weights of all experts are dequantised for each call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gpu.few_rows import Make, bytes_of
from gpu.more_rows import worst_row
from gpu.pace import Pace, Row
from gpu.quantised import BOUNDS
from kiln.engine.layers.block_weight import BlockGroupWeight
from kiln.engine.layers.group_weight import Group4Weight
from kiln.engine.layers.mxfp4_weight import MXFP4Weight
from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.models.fp8_schemes import BlockFP8
from kiln.engine.models.mxfp4_scheme import StackedMXFP4
from kiln.jit_kernels.bench.ceilings import work_on
from kiln.jit_kernels.bench.timing import Call, time_side_by_side
from kiln.jit_kernels.ops.linear.functions import skinny_gemm
from kiln.jit_kernels.ops.quantization.functions import quantize_per_group
from kiln.jit_kernels.ops.quantized_linear.functions import grouped_quantized_gemm

TOKENS = (1, 16, 64)
# Each has its own experts: those of one token would stay in the cache from call to call.
_BATCHES = 8
_ALONE = 64  # rows, at most, that are multiplied alone
_ROUNDS = 30


class Case(NamedTuple):
    """Experts of a layer: the form and the size of the weights of each."""

    form: str
    experts: int
    outputs: int
    inputs: int
    top_k: int


FORMS: dict[str, Make] = {
    "bf16": DenseWeight,
    "mxfp4": StackedMXFP4().quantized,
    "fp8 block, groups of 128": BlockFP8("").quantized,
}
CASES = (  # gate and up, and down, of Qwen3-30B-A3B and of gpt-oss-20b; a large one of few experts
    Case("bf16", 128, 1536, 2048, 8),
    Case("bf16", 128, 2048, 768, 8),
    Case("mxfp4", 32, 5760, 2880, 4),
    Case("mxfp4", 32, 2880, 2880, 4),
    Case("fp8 block, groups of 128", 8, 7168, 4096, 2),
)


class Batch(NamedTuple):
    """Rows sorted by expert, where those of each end, and the expert of each."""

    x: torch.Tensor
    ends: torch.Tensor
    experts: torch.Tensor

    def alone(self, row: int) -> Batch:
        """Return one row."""
        expert = self.experts[row : row + 1]
        numbers = torch.arange(len(self.ends), device=self.ends.device)
        return Batch(self.x[row : row + 1], (numbers >= expert).int(), expert)


Multiply = Callable[[Weight, Batch], torch.Tensor]


def products(args: argparse.Namespace) -> list[Row]:
    """Return one row per case and number of tokens: microseconds, and whether it is right."""

    def rows_of(case: Case) -> Iterable[Row]:
        return rows_of_case(case, "cuda")

    return Pace(args, seconds=45).rows(CASES, lambda case: " ".join(map(str, case)), rows_of)


def rows_of_case(case: Case, device: str) -> list[Row]:
    """Return the rows of a case. ``error``: of the worst row, relative to torch's.

    ``ok``: no kernel's is larger than rounding makes it, and rows have the bits that they have
    alone.
    """
    torch.manual_seed(0)
    weight, found = _weights(case, device), []
    ways = _ways(weight)
    kernels = {name: multiply for name, multiply in ways.items() if name != "torch"}
    for tokens in TOKENS:
        batches = [_batch(case, tokens, device) for _ in range(_BATCHES)]
        wanted = ways["torch"](weight, batches[0])
        outs = {name: multiply(weight, batches[0]) for name, multiply in kernels.items()}
        error = max(worst_row(out, wanted) for out in outs.values())
        row: Row = {**case._asdict(), "tokens": tokens, "mb": round(bytes_of(weight) / 1e6, 1)}
        row["error"] = error
        row["ok"] = error < BOUNDS[torch.bfloat16] and all(
            _has_bits_of_rows_alone(weight, batches[0], kernels[name], out)
            for name, out in outs.items()
        )
        found.append(row | _times(weight, batches, ways))
    return found


def _weights(case: Case, device: str) -> Weight:
    """Return the weights of all experts, made one by one, as all in float32 would be large."""
    kept: list[torch.Tensor] = []
    for expert in range(case.experts):
        values = torch.randn(case.outputs, case.inputs, device=device).mul_(0.02).bfloat16()
        own = FORMS[case.form](values).tensors
        fields = [one for one in own if one is not None]
        if not kept:
            kept = [one.new_empty(case.experts, *one.shape) for one in fields]
        for place, one in zip(kept, fields, strict=True):
            place[expert].copy_(one)
    kind = {"bf16": DenseWeight, "mxfp4": MXFP4Weight}.get(case.form, BlockGroupWeight)
    return kind(*kept)


def _batch(case: Case, tokens: int, device: str) -> Batch:
    """Return the rows of random tokens, each with ``top_k`` experts that differ."""
    chosen = torch.rand(tokens, case.experts, device=device).topk(case.top_k).indices
    experts, order = chosen.flatten().sort(stable=True)
    ends = torch.bincount(experts, minlength=case.experts).cumsum(0).int()
    x = torch.randn(tokens, case.inputs, device=device).bfloat16()
    return Batch(x[order // case.top_k], ends, experts.int())


def _ways(weight: Weight) -> dict[str, Multiply]:
    """Return the ways to multiply; the rounding of rows to groups is in all."""
    ways = {"kernel": _few, "torch": _grouped_mm if weight.form == "DenseWeight" else _dequantised}
    if isinstance(weight, Group4Weight | MXFP4Weight | BlockGroupWeight):
        ways["quantized"] = _many
    return ways


def _few(weight: Weight, batch: Batch) -> torch.Tensor:
    codes, scales = (*weight.tensors, None)[:2]
    assert codes is not None
    x, x_scales = batch.x, None
    if isinstance(weight, BlockGroupWeight):
        x, x_scales = quantize_per_group(batch.x)
    out = batch.x.new_empty(len(x), weight.out_features)
    of_experts = (batch.experts, batch.ends)
    skinny_gemm(x, codes, out, scales=scales, x_scales=x_scales, of_experts=of_experts)
    return out


def _many(weight: Weight, batch: Batch) -> torch.Tensor:
    codes, scales = weight.tensors
    assert codes is not None
    assert scales is not None
    x = weight.activations(batch.x) if isinstance(weight, BlockGroupWeight) else batch.x
    out = x.new_empty(len(x), weight.out_features)
    grouped_quantized_gemm(x, codes, scales, out, batch.ends)
    return out


def _grouped_mm(weight: Weight, batch: Batch) -> torch.Tensor:
    assert isinstance(weight, DenseWeight)
    return F.grouped_mm(batch.x, weight.values.transpose(1, 2), offs=batch.ends)


def _dequantised(weight: Weight, batch: Batch) -> torch.Tensor:
    return Weight.grouped(weight, *batch)


def _has_bits_of_rows_alone(
    weight: Weight, batch: Batch, multiply: Multiply, out: torch.Tensor
) -> bool:
    """Whether rows from all over a product have the bits that they have alone."""
    rows = range(0, len(out), -(-len(out) // _ALONE))
    alone = [multiply(weight, batch.alone(row)) for row in rows]
    return torch.equal(out[list(rows)], torch.cat(alone))


def _times(weight: Weight, batches: list[Batch], ways: dict[str, Multiply]) -> Row:
    """Return the microseconds of each way, for the batches in turn."""

    def calls(multiply: Multiply) -> list[Call]:
        return [lambda one=one: multiply(weight, one) for one in batches]  # type: ignore[misc]

    make = work_on(weight.device.type)
    works = {name: make(calls(multiply)) for name, multiply in ways.items()}
    times = time_side_by_side(works, max_rounds=_ROUNDS)
    found: Row = {f"{name}_us": round(one.median_us, 2) for name, one in times.items()}
    found["speed"] = round(times["torch"].median_us / times["kernel"].median_us, 2)
    return found
