"""The kernel of few rows computes a gated activation too, with the bits of both in turn."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from weight_forms import FORMS, INPUTS

from kiln.engine.layers import few_rows
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.mlp import GATES, GatedMLP
from kiln.engine.layers.row_limits import RowLimits
from kiln.engine.layers.weight import Weight
from kiln.engine.lora.sites import LoRALinear
from kiln.jit_kernels import implementations

ROUNDS = ("token", "static", "int8 token", "int8 static", "block group")
FUSED = [name for name in FORMS if name not in ("mxfp4", "mixed", *ROUNDS)]


@pytest.fixture
def runs(monkeypatch):
    """The names of the kernels that have multiplied, or computed an activation."""
    found, decide = [], implementations._decide

    def recording(spec, variant, device):
        made = decide(spec, variant, device)
        if spec.family not in ("linear", "activation") or made.implementation == "torch":
            return made

        def run(a, bound):
            found.append(spec.name)
            made.run(a, bound)

        return dataclasses.replace(made, run=run)

    monkeypatch.setattr(implementations, "_decide", recording)
    torch.manual_seed(9)
    return found


def projection(weight: Weight, bias: bool) -> Linear:
    added = torch.randn(weight.out_features).bfloat16() if bias else None
    return Linear.of(weight, added, torch.bfloat16)


def in_turn(layer: Linear, x: torch.Tensor, activation: str) -> torch.Tensor:
    both = layer(x)
    out = both.new_empty(len(x), both.shape[1] // 2)
    GATES[activation].operator(out, both)
    return out


@pytest.mark.parametrize(("rows", "activation"), [(1, "silu"), (13, "gelu_pytorch_tanh")])
@pytest.mark.parametrize("name", FUSED)
def test_every_form_has_the_bits_of_both_in_turn(environment, runs, name, rows, activation):
    environment(KILN_CPU_KERNELS="host")
    layer, x = projection(FORMS[name](), rows > 1), torch.randn(rows, INPUTS).bfloat16()
    got = layer.gated(x, GATES[activation])
    kernel = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}[activation]
    assert runs == [f"skinny_gemm_{kernel}_and_mul"]
    assert torch.equal(got, in_turn(layer, x, activation))


@pytest.mark.parametrize("name", FORMS)
def test_what_it_has_no_variant_for_is_computed_in_turn(environment, runs, name):
    environment(KILN_CPU_KERNELS="host")
    weight = FORMS[name]()
    layer, x = projection(weight, True), torch.randn(17, INPUTS).bfloat16()
    assert torch.equal(layer.gated(x, GATES["silu"]), in_turn(layer, x, "silu"))
    assert "skinny_gemm_silu_and_mul" not in runs
    few = x[:3]
    assert torch.equal(layer.gated(few, GATES["gelu"]), in_turn(layer, few, "gelu"))
    if name not in FUSED:
        assert torch.equal(layer.gated(few, GATES["silu"]), in_turn(layer, few, "silu"))
    assert {"gelu_and_mul", "silu_and_mul", "skinny_gemm"} <= {*runs}
    assert not any(one.startswith("skinny_gemm_") for one in runs)


@pytest.mark.parametrize("toggle", ["KILN_LINEAR=torch", "KILN_ACTIVATION=torch"])
def test_toggles_hold_for_both_halves(environment, runs, toggle):
    family, _, choice = toggle.partition("=")
    environment(KILN_CPU_KERNELS="host", **{family: choice})
    layer, x = projection(FORMS["channel"](), False), torch.randn(2, INPUTS).bfloat16()
    got = layer.gated(x, GATES["silu"])
    assert runs == ["silu_and_mul" if family == "KILN_LINEAR" else "skinny_gemm"]
    gate, up = layer(x).float().chunk(2, dim=1)
    torch.testing.assert_close(got.float(), F.silu(gate) * up, rtol=0.02, atol=0.02)


def test_triton_has_no_form_of_it(environment):
    assert few_rows.gates_few("silu")
    assert not few_rows.gates_few("gelu")
    environment(KILN_LINEAR="triton")
    assert not few_rows.gates_few("silu")


@pytest.mark.parametrize("is_large", [False, True])
def test_on_a_gpu_weights_must_not_be_too_large(environment, runs, monkeypatch, is_large):
    environment(KILN_CPU_KERNELS="host")
    limits = RowLimits({}, built_in=True, source="")
    monkeypatch.setattr(few_rows, "_is_unlimited", lambda device: False)
    monkeypatch.setattr(few_rows, "limits_on", lambda device: limits)
    layer, x = projection(FORMS["dense"](), False), torch.randn(2, INPUTS).bfloat16()
    most = layer.weight.values.nbytes - is_large
    monkeypatch.setattr(few_rows, "MOST_GATED_BYTES", most)
    layer.gated(x, GATES["silu"])
    in_turn = ["skinny_gemm", "silu_and_mul"]
    assert runs == (in_turn if is_large else ["skinny_gemm_silu_and_mul"])


def test_a_mlp_has_it_between_its_products(environment, runs):
    environment(KILN_CPU_KERNELS="host")
    gate_up, down = FORMS["dense"](), FORMS["dense"]()
    down = dataclasses.replace(down, values=down.values[:, : gate_up.out_features // 2])
    mlp = GatedMLP(projection(gate_up, False), "silu", projection(down, False))
    x = torch.randn(4, INPUTS).bfloat16()
    got = mlp(x)
    assert runs == ["skinny_gemm_silu_and_mul", "skinny_gemm"]
    assert torch.equal(got, mlp.down(in_turn(mlp.gate_up, x, "silu")))
    assert [spec.name for spec in mlp.kernels] == ["silu_and_mul", "skinny_gemm_silu_and_mul"]


def test_adapters_add_to_the_product_before_it(environment, runs, monkeypatch):
    environment(KILN_CPU_KERNELS="host")
    weight, x = FORMS["dense"](), torch.randn(2, INPUTS).bfloat16()
    added = torch.randn(2, weight.out_features).bfloat16()

    def lora(x, tensors, bias, form, rows, out):
        out.copy_(weight.linear(x, bias) + added)

    monkeypatch.setattr("kiln.engine.lora.sites.lora_linear", lora)
    layer = LoRALinear(weight, None, True, rows=torch.zeros(1, dtype=torch.int32))
    gate, up = (weight.linear(x, None) + added).float().chunk(2, dim=1)
    got = layer.gated(x, GATES["silu"])
    torch.testing.assert_close(got.float(), F.silu(gate) * up, rtol=0.02, atol=0.02)
    assert runs == ["silu_and_mul"]
