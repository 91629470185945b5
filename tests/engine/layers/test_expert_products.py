"""Products of rows with their experts' weights: right in every form, by the kernel that should."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from product_runs import BOUND, error_of, in_any_order, int4, mxfp4, record, stacked

from kiln.engine.layers import few_rows
from kiln.engine.layers.block_weight import BlockGroupWeight, BlockWeight
from kiln.engine.layers.channel_weight import ChannelWeight, StaticWeight, TokenWeight
from kiln.engine.layers.few_rows import multiplies_experts
from kiln.engine.layers.many_rows import MOST_ROWS, MOST_ROWS_OF_BYTES
from kiln.engine.layers.row_limits import _OF_EXPERTS
from kiln.engine.layers.weight import FORMS as ALL_FORMS
from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.models.fp8_schemes import BlockFP8, ChannelFP8
from kiln.engine.models.group_schemes import quantized_by_group
from kiln.jit_kernels import implementations
from kiln.jit_kernels.compile.ready import ReadyGuard

OUTPUTS, INPUTS = 72, 256
FP8 = torch.float8_e4m3fn
SKINNY, QUANTIZED = "skinny_gemm", "quantized_gemm"
COUNTS = (0, 3, 0, 9, 1, 0)  # rows of each expert
BEHIND = 4  # rows of no expert


def _values() -> torch.Tensor:
    return (torch.randn(OUTPUTS, INPUTS) / 16).bfloat16()


def _codes() -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS).to(FP8)


def _int8() -> torch.Tensor:
    return torch.randint(-128, 128, (OUTPUTS, INPUTS), dtype=torch.int8)


def _scales(*size: int) -> torch.Tensor:
    return 0.01 + 0.1 * torch.rand(size)


FORMS = {
    "dense": lambda: DenseWeight(_values()),
    "channel": lambda: ChannelFP8("channel", "none").quantized(_values()),
    "token": lambda: ChannelFP8("channel", "token").quantized(_values()),
    "static": lambda: StaticWeight(_codes(), _scales(OUTPUTS, 1), 0.01 + 0.02 * torch.rand(1)),
    "int8": lambda: ChannelWeight(_int8(), _scales(OUTPUTS, 1)),
    "int8 token": lambda: TokenWeight(_int8(), _scales(OUTPUTS, 1)),
    "int8 static": lambda: StaticWeight(_int8(), _scales(OUTPUTS, 1), 0.01 + 0.02 * torch.rand(1)),
    "block": lambda: BlockFP8("", rounds=False).quantized(_values()),
    "block from the middle": lambda: BlockWeight.of(_codes(), _scales(2, INPUTS // 128), 100),
    "block group": lambda: BlockFP8("").quantized(_values()),
    "int4": lambda: int4(128, True, INPUTS),
    "int4, 288 inputs": lambda: int4(32, False, 288),
    "mxfp4": lambda: mxfp4(INPUTS),
    "mxfp4, 288 inputs": lambda: mxfp4(288),
}
OF_CODES = tuple(name for name in FORMS if name != "dense")
# What no kernel reads.
OTHERS = {
    "any order": lambda: in_any_order(INPUTS),
    "mxfp4 in blocks of 16": lambda: mxfp4(272),
    "int8 in groups": lambda: quantized_by_group(_values(), 8, 128, asymmetric=False),
}


@pytest.fixture
def runs(monkeypatch):
    """The kernels that have multiplied, and their rows."""
    torch.manual_seed(5)
    return record(monkeypatch)


def inputs_of(name: str) -> int:
    """Return the inputs of the weights of a name."""
    return 288 if "288" in name else 272 if "of 16" in name else INPUTS


def multiply(
    weights: tuple[Weight, Sequence[Weight]],
    inputs: int,
    counts: Sequence[int],
    behind: int = BEHIND,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Check the product of as many rows of each expert, and of others behind."""
    together, each = weights
    total = sum(counts)
    x = torch.randn(total + behind, inputs).to(dtype)
    x[total:] = torch.nan
    ends = torch.tensor(counts).cumsum(0).int()
    own = [expert for expert, count in enumerate(counts) for _ in range(count)]
    experts = torch.tensor([*own, *[1] * behind], dtype=torch.int32)
    out = together.grouped(x, ends, experts)
    assert (out.shape, out.dtype) == ((total + behind, OUTPUTS), dtype)
    for expert, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True)):
        if count:
            place = slice(end - count, end)
            assert error_of(each[expert], x[place], out[place], None) < BOUND, expert


@pytest.mark.parametrize("name", FORMS)
def test_each_row_is_the_product_with_its_expert(environment, runs, name):
    environment(KILN_CPU_KERNELS="host")
    weights, inputs = stacked(FORMS[name], len(COUNTS)), inputs_of(name)
    multiply(weights, inputs, COUNTS)
    multiply(weights, inputs, (9, 8, 10, 7, 9, 8))  # more than four of each: blocks of 16 rows
    assert runs == [(SKINNY, 13 + BEHIND), (SKINNY, 51 + BEHIND)]
    runs.clear()
    environment(KILN_CPU_KERNELS="torch")
    multiply(weights, inputs, COUNTS)
    assert not runs


def test_every_form_that_experts_may_have_is_tested():
    tested = {type(make()) for make in FORMS.values()}
    assert tested == {ALL_FORMS[name] for name in _OF_EXPERTS}
    assert BlockGroupWeight in tested
    assert TokenWeight in tested
    assert ChannelWeight in tested


@pytest.mark.parametrize("name", FORMS)
def test_toggles_choose_the_other_kernel_or_torch(environment, runs, name):
    weights, inputs = stacked(FORMS[name], len(COUNTS)), inputs_of(name)
    rows = sum(COUNTS) + BEHIND
    environment(KILN_CPU_KERNELS="host", KILN_LINEAR="torch")
    multiply(weights, inputs, COUNTS)
    assert runs == ([(QUANTIZED, rows)] if name in OF_CODES else [])
    runs.clear()
    environment(KILN_QUANTIZED_LINEAR="torch")
    multiply(weights, inputs, COUNTS)
    assert not runs
    environment(KILN_LINEAR="auto")
    multiply(weights, inputs, COUNTS)
    assert runs == [(SKINNY, rows)]


@pytest.mark.parametrize("name", OTHERS)
def test_what_no_kernel_reads_is_dequantised(environment, runs, name):
    environment(KILN_CPU_KERNELS="host")
    multiply(stacked(OTHERS[name], len(COUNTS)), inputs_of(name), COUNTS)
    assert not runs


@pytest.mark.parametrize("name", ["dense", "token", "int4", "mxfp4"])
def test_more_rows_than_the_table_has_are_multiplied_otherwise(
    environment, monkeypatch, runs, name
):
    """As on a GPU that the built-in table knows, which a device without an index stands for."""
    environment(KILN_CPU_KERNELS="host")
    monkeypatch.setattr(few_rows, "_is_unlimited", lambda device: False)
    weights, inputs = stacked(FORMS[name], 2), inputs_of(name)
    most = 2 * _OF_EXPERTS[weights[0].form]
    codes = weights[0].tensors[0]
    for rows, wanted in ((0, False), (1, True), (most, True), (most + 1, False)):
        assert multiplies_experts(weights[0].form, codes, torch.bfloat16, rows) == wanted
    multiply(weights, inputs, (most - 1, 1), 0)
    assert runs == [(SKINNY, most)]
    runs.clear()
    multiply(weights, inputs, (1, most - 1), 1)
    limit = 2 * (MOST_ROWS if "4" in name else MOST_ROWS_OF_BYTES)
    multiply(weights, inputs, (limit - 1, 1), 0)
    rows = (most + 1, limit)
    assert runs == ([(QUANTIZED, one) for one in rows] if name in OF_CODES else [])
    runs.clear()
    multiply(weights, inputs, (limit - 1, 1), 1)
    assert not runs


@pytest.mark.parametrize("name", ["dense", "block group", "mxfp4"])
def test_a_variant_that_was_not_chosen_before_ready_is_not_compiled_then(
    environment, monkeypatch, runs, name
):
    environment(KILN_CPU_KERNELS="host")
    weights, inputs = stacked(FORMS[name], len(COUNTS)), inputs_of(name)
    guard = ReadyGuard("warn")
    guard.declare_ready()
    with monkeypatch.context() as patch:
        patch.setattr(implementations, "ready_guard", lambda: guard)
        multiply(weights, inputs, COUNTS)
    assert not runs
    assert not {SKINNY, QUANTIZED} & {key[1] for key in implementations._decided}
    multiply(weights, inputs, COUNTS)
    assert [kernel for kernel, _ in runs] == [SKINNY]


def test_float32_is_multiplied_by_torch(environment, runs):
    environment(KILN_CPU_KERNELS="host")
    for name in ("token", "mxfp4"):
        weights = stacked(FORMS[name], len(COUNTS))
        multiply(weights, INPUTS, COUNTS, dtype=torch.float32)
    assert not runs
