"""Record which kernels multiply, with how many rows; and weights of experts from those of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kiln.engine.layers.group_weight import Group4Weight
from kiln.engine.layers.weight import Weight
from kiln.engine.models.group_schemes import quantized_by_group
from kiln.engine.models.mxfp4_scheme import StackedMXFP4
from kiln.jit_kernels import implementations

KERNELS = ("skinny_gemm", "quantized_gemm")
BOUND = 8e-3  # of a row, relative to its length: the rounding of inputs and results to bf16


def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list to which each product by one of KERNELS is added: its name and its rows."""
    found: list[tuple[str, int]] = []
    decide = implementations._decide

    def recording(spec: Any, variant: Any, device: torch.device) -> Any:
        made = decide(spec, variant, device)
        if spec.name not in KERNELS or made.implementation == "torch":
            return made

        def run(a: Any, bound: Any) -> None:
            found.append((spec.name, len(a.x)))
            made.run(a, bound)

        return dataclasses.replace(made, run=run)

    monkeypatch.setattr(implementations, "_decide", recording)
    return found


def int4(group: int, zeros: bool, inputs: int, outputs: int = 72) -> Weight:
    """Return random weights in groups of inputs, 0: of all, with zero points or without."""
    values = torch.randn(outputs, inputs) / 16
    return quantized_by_group(values, 4, group, asymmetric=zeros)


def mxfp4(inputs: int, outputs: int = 72) -> Weight:
    """Return random weights in blocks of 32 inputs, or of a part of that."""
    return StackedMXFP4().quantized(torch.randn(outputs, inputs) / 16)


def in_any_order(inputs: int, outputs: int = 72) -> Weight:
    """Return weights whose groups are of inputs from anywhere."""
    made = quantized_by_group(
        torch.randn(outputs, inputs) / 16, 4, 32, asymmetric=True, gives_order=True
    )
    assert isinstance(made, Group4Weight)
    assert made.group_of is not None
    order = made.group_of[torch.randperm(inputs)]
    return dataclasses.replace(made, group_of=order)


def stacked(make: Callable[[], Weight], count: int) -> tuple[Weight, Sequence[Weight]]:
    """Return the weights of as many experts, and those of each."""
    each = [make() for _ in range(count)]
    fields = zip(*(one.tensors for one in each), strict=True)
    together = [None if own[0] is None else torch.stack(own) for own in fields]
    return type(each[0])(*together), each


def error_of(
    weight: Weight, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> float:
    """Return the largest error of a row, relative to its length, against float64."""
    wide = weight.activations(x.float()).double()
    exact = wide @ weight.dequantized(slice(None), torch.float32).double().T
    exact += 0 if bias is None else bias.double()
    return float(((out.double() - exact).norm(dim=1) / exact.norm(dim=1)).max())
