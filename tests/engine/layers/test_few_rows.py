"""Products of a few rows run Kiln's kernel where they may, whatever the form of the weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from depth import at_depth
from weight_forms import FORMS, INPUTS, codes, dense, int8, scales

from kiln.engine.layers import channel_weight, few_rows
from kiln.engine.layers.channel_weight import ChannelWeight
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.weight import Weight
from kiln.engine.layers.weight_parts import MixedWeight
from kiln.jit_kernels import implementations
from kiln.jit_kernels.ops.linear.spec import SKINNY_GEMM

BOUND = 8e-3  # of a row, relative to its length: the rounding of inputs and results to bf16


@pytest.fixture
def runs(monkeypatch):
    """The numbers of rows that the kernel has multiplied."""
    found, decide = [], implementations._decide

    def recording(spec, variant, device):
        made = decide(spec, variant, device)
        if spec.name != "skinny_gemm" or made.implementation == "torch":
            return made

        def run(a, bound):
            found.append(len(a.x))
            made.run(a, bound)

        return dataclasses.replace(made, run=run)

    monkeypatch.setattr(implementations, "_decide", recording)
    torch.manual_seed(5)
    return found


def _assert_right(weight: Weight, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    out = torch.full((len(x), weight.out_features), torch.nan, dtype=x.dtype)
    weight.product(x, out, bias)
    parts = weight.parts if isinstance(weight, MixedWeight) else (weight,)
    wide = [
        one.activations(x.float()).double() @ one.dequantized(slice(None), torch.float32).double().T
        for one in parts
    ]
    exact = torch.cat(wide, dim=1) + (0 if bias is None else bias.double())
    assert float(((out.double() - exact).norm(dim=1) / exact.norm(dim=1)).max()) < BOUND


@pytest.mark.parametrize("rows", at_depth([3, 16], [1, 2, 8, 9, 16]))
@pytest.mark.parametrize("name", FORMS)
def test_every_form_multiplies_up_to_16_rows_with_the_kernel(environment, runs, name, rows):
    environment(KILN_CPU_KERNELS="host")
    weight, x = FORMS[name](), torch.randn(rows, INPUTS).bfloat16()
    bias = torch.randn(weight.out_features).bfloat16()
    for own in (None, bias):
        _assert_right(weight, x, own)
    assert runs == [rows] * (4 if name == "mixed" else 2)


@pytest.mark.parametrize("name", FORMS)
def test_more_rows_other_dtypes_and_toggles_do_not(environment, runs, name):
    environment(KILN_CPU_KERNELS="host")
    weight = FORMS[name]()
    _assert_right(weight, torch.randn(17, INPUTS).bfloat16(), None)
    environment(KILN_CPU_KERNELS="host", KILN_LINEAR="torch")
    _assert_right(weight, torch.randn(2, INPUTS).bfloat16(), None)
    environment()
    _assert_right(weight, torch.randn(2, INPUTS).bfloat16(), None)
    assert not runs


@pytest.mark.parametrize("make", [codes, int8])
def test_rows_of_codes_that_do_not_suit_the_kernel_are_multiplied_otherwise(
    environment, runs, make
):
    environment(KILN_CPU_KERNELS="host")
    weight = ChannelWeight(make(16, 96), scales(16, 1))
    _assert_right(weight, torch.randn(2, 96).bfloat16(), None)
    assert not runs


def test_the_log_says_which_rows_the_kernel_multiplies(environment):
    said = {name: make().describe() for name, make in FORMS.items()}
    assert not any("skinny_gemm" in text for text in said.values())
    environment(KILN_CPU_KERNELS="host")
    for name, make in FORMS.items():
        own = make().describe()
        assert ("up to 16 rows by skinny_gemm, more: " in own) == (name != "dense"), own


def test_only_what_the_kernel_multiplies_is_opaque_to_torch_compile(environment):
    weight = dense()
    assert not Linear.of(weight, None, torch.bfloat16).is_opaque
    environment(KILN_CPU_KERNELS="host")
    assert Linear.of(weight, None, torch.bfloat16).is_opaque
    assert not Linear.of(weight, None, torch.float32).is_opaque
    x = torch.randn(2, INPUTS).bfloat16()
    opaque = Linear.of(weight, None, torch.bfloat16)(x)
    torch.testing.assert_close(opaque, Linear(weight)(x), rtol=0.02, atol=0.02)

    needs = {"scalar_t": "kiln::bf16"}
    environment(KILN_LINEAR="jit")
    assert few_rows.few_row_kernels(torch.device("cuda", 0), needs)


@pytest.mark.parametrize("name", FORMS)
def test_a_trial_forces_the_choice_and_tells_what_the_kernel_multiplied(environment, runs, name):
    environment(KILN_CPU_KERNELS="host")
    weight, x = FORMS[name](), torch.randn(3, INPUTS).bfloat16()
    with few_rows.trial(2) as trial:
        _assert_right(weight, x, None)
    assert not trial.products
    assert not runs
    with few_rows.trial(3) as trial:
        _assert_right(weight, x, None)
    parts = weight.parts if isinstance(weight, MixedWeight) else (weight,)
    columns = [one.tensors[0].shape[1] for one in parts]  # of codes of 4 bits: half of the inputs
    assert columns == [INPUTS // (2 if "4" in name else 1)] * len(parts)
    sizes = {
        (
            *(one.form, "bfloat16", one.out_features, size),
            str(one.tensors[0].dtype).removeprefix("torch."),
        )
        for one, size in zip(parts, columns, strict=True)
    }
    assert set(map(tuple, trial.products)) == sizes
    assert runs


@pytest.mark.parametrize("name", FORMS)
def test_the_triton_form_multiplies_them_if_the_toggle_says_so(
    environment, runs, monkeypatch, name
):
    environment(KILN_CPU_KERNELS="host", KILN_LINEAR="triton")
    monkeypatch.setattr(
        implementations,
        "_triton",
        lambda spec, variant, device: (
            "triton", "", lambda a, bound: implementations.run_reference(spec, a)
        ),
    )  # fmt: skip
    _assert_right(FORMS[name](), torch.randn(16, INPUTS).bfloat16(), None)
    assert runs == [16] * (2 if name == "mixed" else 1)


@pytest.mark.parametrize("name", ["token", "int8 token", "static", "int8 static"])
def test_the_log_says_how_more_rows_of_codes_are_multiplied(environment, monkeypatch, name):
    monkeypatch.setattr(channel_weight, "multiplies_rows", lambda codes: True)
    kind, way = ("int8", "torch._int_mm") if "int8" in name else ("fp8", "torch._scaled_mm")
    said = FORMS[name]().describe()
    assert said.startswith(f"{kind}, one scale per output, activations ")
    assert said.endswith(f", {way}")
    environment(KILN_CPU_KERNELS="host")
    few = f"up to 16 rows by skinny_gemm, more: {way}"
    assert FORMS[name]().describe() == f"{said.removesuffix(way)}{few}"


def test_a_model_with_codes_beside_plain_weights_has_the_kernel(environment):
    environment(KILN_CPU_KERNELS="host")
    cpu = torch.device("cpu")
    for kind, scaled in (("E4M3", "kByOutput"), ("E4M3", "kByBlock"), ("I8", "kByOutput")):
        needs = {"scalar_t": "kiln::bf16", "weight": ["Plain", kind], "input": ["Plain", kind]}
        own = {**needs, "scaled": ["kNone", scaled]}
        assert few_rows.few_row_kernels(cpu, own) == [SKINNY_GEMM]
        assert not few_rows.few_row_kernels(cpu, {**own, "scalar_t": "float"})
        environment(KILN_CPU_KERNELS="host", KILN_LINEAR="jit")
        made = implementations.decide([SKINNY_GEMM], cpu, own).made
        assert {one.variant["scaled"] for one in made} == {"kNone", scaled}
        without = {**needs, "weight": "Plain", "input": "Plain", "scaled": scaled}
        assert SKINNY_GEMM.lacking(without) == [without]
