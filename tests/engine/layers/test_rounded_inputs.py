"""A norm or silu that rounds for the product behind it gives the bits of rounding in between."""

from __future__ import annotations

import pytest
import torch
from depth import at_depth
from weight_forms import FORMS, INPUTS, OUTPUTS, codes, dense, scales

from kiln.engine.layers import rounding
from kiln.engine.layers.block_weight import BlockGroupWeight
from kiln.engine.layers.channel_weight import TokenWeight
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.mlp import GatedMLP, PlainMLP
from kiln.engine.layers.norm import RoundedStreamNorm, StreamNorm
from kiln.engine.layers.parallel import RowParallel
from kiln.engine.layers.rounding import Rounded, Rounding
from kiln.engine.layers.weight import Weight
from kiln.engine.lora.sites import LoRALinear
from kiln.engine.models.build_layer import first_product
from kiln.jit_kernels.ops.activation.spec import BY_ACTIVATION
from kiln.jit_kernels.ops.norm.spec import FUSED_ADD_RMS_NORM

ROUNDS = ("token", "static", "int8 token", "int8 static", "block group")
BF16 = torch.bfloat16
ROWS = at_depth([1, 17, 66], [1, 2, 16, 17, 31, 65, 130])


@pytest.fixture(params=["torch", "host"], autouse=True)
def kernels(request, environment):
    torch.manual_seed(3)
    environment(KILN_CPU_KERNELS=request.param)


def projection(weight: Weight, bias: bool = False) -> Linear:
    added = torch.randn(weight.out_features).to(BF16) if bias else None
    return Linear.of(weight, added, BF16)


def norm(round_once: bool = False) -> StreamNorm:
    return StreamNorm(torch.randn(INPUTS).to(BF16), 1e-5, float(round_once), round_once)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ROUNDS)
def test_the_norm_rounds_as_the_product_would(name, rows):
    layer, first = projection(FORMS[name](), True), norm(round_once=rows == 17)
    how = layer.rounding(BF16, INPUTS, FUSED_ADD_RMS_NORM)
    x, residual = torch.randn(2, rows, INPUTS).to(BF16)
    other, sums = x.clone(), residual.clone()
    rounded = RoundedStreamNorm(first, how)(x, residual)
    wanted = layer(first(other, sums))
    assert rounded.codes.dtype == layer.weight.codes.dtype
    assert torch.equal(layer(rounded), wanted)
    assert torch.equal(residual, sums)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ROUNDS)
def test_silu_rounds_as_the_last_product_would(name, rows):
    down = projection(FORMS[name]())
    gate_up, x = projection(dense(2 * INPUTS), True), torch.randn(rows, INPUTS).to(BF16)
    how = down.rounding(BF16, INPUTS, FUSED_ADD_RMS_NORM)
    assert how is not None
    assert torch.equal(GatedMLP(gate_up, "silu", down, how)(x), GatedMLP(gate_up, "silu", down)(x))


@pytest.mark.parametrize("name", FORMS)
def test_only_what_rounds_its_inputs_has_them_rounded(name, environment):
    layer = projection(FORMS[name]())
    assert (layer.rounding(BF16, INPUTS, FUSED_ADD_RMS_NORM) is not None) == (name in ROUNDS)
    assert layer.rounding(torch.float16, INPUTS, FUSED_ADD_RMS_NORM) is None
    environment(KILN_NORM="torch")
    assert layer.rounding(BF16, INPUTS, FUSED_ADD_RMS_NORM) is None
    silu = layer.rounding(BF16, INPUTS, BY_ACTIVATION["silu"])
    assert (silu is not None) == (name in ROUNDS)
    environment()
    adapted = LoRALinear(layer.weight, rows=torch.zeros(1, dtype=torch.int32))
    assert adapted.rounding(BF16, INPUTS, FUSED_ADD_RMS_NORM) is None
    if name not in ROUNDS:
        with pytest.raises(TypeError, match="does not round its inputs"):
            layer(Rounded(codes(2, INPUTS), scales(2, 1)))


def test_blocks_with_zeros_behind_the_inputs_round_for_themselves():
    layer = projection(BlockGroupWeight.of(codes(OUTPUTS, 200), scales(1, 2)))
    assert layer.rounding(BF16, 200, FUSED_ADD_RMS_NORM) is None
    assert layer(torch.randn(3, 200).to(BF16)).isfinite().all()


def test_the_first_product_of_a_layer_is_the_one_that_reads_its_input():
    one, other = projection(FORMS["token"]()), projection(FORMS["static"]())
    assert first_product(RowParallel(GatedMLP(one, "silu", other), "tp")) is one
    assert first_product(PlainMLP(one, "relu2", other)) is one
    assert first_product(one) is None


def test_a_partial_sum_is_summed_before_it_is_rounded(monkeypatch):
    from kiln.engine.layers.partial_sum import PartialSum

    class Twins:
        """Two ranks with the same summand."""

        def all_reduce_add_rms_norm(self, *arguments):
            return False

        def all_reduce(self, x):
            x *= 2

    monkeypatch.setattr("kiln.engine.layers.partial_sum.group_named", lambda name: Twins())
    first, how = norm(), Rounding(torch.int8)
    x, residual = torch.randn(2, 5, INPUTS).to(BF16)
    got = RoundedStreamNorm(first, how)(PartialSum(x.clone(), "twins"), residual.clone())
    wanted = how.of(first(2 * x, residual.clone()))
    assert torch.equal(got.codes, wanted.codes)
    assert torch.equal(got.scales, wanted.scales)


def test_scales_by_column_are_those_by_row():
    x = torch.randn(7, INPUTS).to(BF16)
    by_row, by_column = (
        Rounding(torch.float8_e4m3fn, 128, by_column=one).of(x) for one in (False, True)
    )
    assert torch.equal(by_row.scales, by_column.scales)
    assert [one.scales.stride() for one in (by_row, by_column)] == [(2, 1), (1, 7)]
    weight = TokenWeight(codes(OUTPUTS, INPUTS), scales(OUTPUTS, 1))
    assert weight.rounding(INPUTS) == Rounding(torch.float8_e4m3fn)
    assert {spec.name for spec in rounding.ROUNDING_KERNELS} == {
        "quantize", "fused_add_rms_norm_quant", "silu_and_mul_quant",
    }  # fmt: skip
