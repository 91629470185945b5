"""Every packer's modules, read by Kiln's schemes: the weights are those of the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packers.packer import Packed, Packer, all_packers
from safetensors.torch import save_file
from torch._subclasses import FakeTensorMode

from kiln.engine.errors import ConfigError
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.fields import Fields
from kiln.engine.models.quantization import read_quantization
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.scheme import DENSE, AtLoad, Part
from kiln.engine.models.split import Share, all_of

CPU = torch.device("cpu")
PACKERS = all_packers()


EXPERT = "model.layers.0.mlp.experts.0."  # every format has experts
NAME = f"{EXPERT}up_proj"


def read(folder: Path, packer: Packer, outputs: Share | list[Share], inputs: Share) -> Any:
    """Return a module as a rank reads it, or several runs of its outputs."""
    fields = Fields({"quantization_config": dict(packer.config)}, folder / "config.json")
    source = SafetensorsWeights(folder)
    scheme = read_quantization(fields, folder).scheme(NAME, "gate_up_proj", source)
    runs = outputs if isinstance(outputs, list) else [outputs]
    return scheme.linear([Part(source, "l", NAME, run, inputs, torch.float32, CPU) for run in runs])


def write(folder: Path, packer: Packer, outputs: int, inputs: int) -> Packed:
    """Write a module beside another of its expert, and return it."""
    generator = torch.Generator().manual_seed(outputs * inputs)
    modules = {
        name: packer.pack(
            torch.randn(outputs, inputs, generator=generator, dtype=torch.float64), generator
        )
        for name in (f"{EXPERT}gate_proj", NAME)
    }
    save_file(packer.stored(modules), folder / "model.safetensors")
    return modules[NAME]


@pytest.mark.parametrize("name", sorted(PACKERS))
@pytest.mark.parametrize("outputs", [64, 192, 320])
def test_a_module_is_the_formula_rounded_once(tmp_path, name, outputs):
    wanted = write(tmp_path, PACKERS[name], outputs, 256).weight
    weight = read(tmp_path, PACKERS[name], all_of(outputs), all_of(256))
    assert weight.out_features == outputs
    got = weight.dequantized(slice(None), torch.float32)[:, :256]
    torch.testing.assert_close(got, wanted.float(), rtol=2**-23, atol=0)
    rows = slice(7, 51)
    assert torch.equal(weight.dequantized(rows, torch.float32)[:, :256], got[rows])


@pytest.mark.parametrize("name", sorted(PACKERS))
def test_a_rank_has_its_share_of_outputs_and_inputs(tmp_path, name):
    wanted = write(tmp_path, PACKERS[name], 192, 256).weight
    for outputs in (Share(0, 96, 192, 96), Share(96, 96, 192, 96), Share(128, 64, 192, 100)):
        weight = read(tmp_path, PACKERS[name], outputs, all_of(256))
        got = weight.dequantized(slice(None), torch.float32)[:, :256]
        assert len(got) == outputs.room
        torch.testing.assert_close(
            got[: outputs.size], wanted[outputs.place].float(), rtol=2**-23, atol=0
        )
        assert not got[outputs.size :].any()
    for inputs in (Share(0, 128, 256, 128), Share(128, 128, 256, 128)):
        weight = read(tmp_path, PACKERS[name], all_of(192), inputs)
        got = weight.dequantized(slice(None), torch.float32)
        torch.testing.assert_close(got, wanted[:, inputs.place].float(), rtol=2**-23, atol=0)


@pytest.mark.parametrize("name", sorted(PACKERS))
def test_runs_of_the_outputs_of_a_module_are_kept_as_one_weight(tmp_path, name):
    """As of a module of q, k and v, of which a rank has a share of each."""
    packer, runs = PACKERS[name], [(40, 24), (136, 72), (250, 70)]
    wanted = write(tmp_path, packer, 320, 256).weight.float()
    shares = [Share(start, size, 320, size) for start, size in runs]
    weight = read(tmp_path, packer, shares, all_of(256))
    assert "+" not in weight.form
    got = weight.dequantized(slice(None), torch.float32)[:, :256]
    own = torch.cat([wanted[share.place] for share in shares])
    torch.testing.assert_close(got, own, rtol=2**-23, atol=0)


@pytest.mark.parametrize("name", sorted(PACKERS))
@pytest.mark.parametrize(
    "inputs", [Share(40, 104, 256, 104), Share(72, 90, 256, 96), Share(250, 6, 256, 32)], ids=str
)
def test_a_share_may_begin_and_end_inside_a_group_of_inputs(tmp_path, name, inputs):
    packer = PACKERS[name]
    wanted = write(tmp_path, packer, 64, 256).weight[:, inputs.place].float()
    if "block" in name:  # Kiln keeps blocks whole, because most files round activations by them
        numbers = f"inputs {inputs.start} to {inputs.start + inputs.size} of 256"
        with pytest.raises(ConfigError, match=numbers):
            read(tmp_path, packer, all_of(64), inputs)
        return
    weight = read(tmp_path, packer, all_of(64), inputs)
    got = weight.dequantized(slice(None), torch.float32)[:, : inputs.room]
    assert got.shape == (64, inputs.room)
    torch.testing.assert_close(got[:, : inputs.size], wanted, rtol=2**-23, atol=0)
    assert not got[:, inputs.size :].any()


@pytest.mark.parametrize("name", sorted(PACKERS))
def test_random_weights_have_the_form_of_stored_ones(tmp_path, name):
    packer = PACKERS[name]
    write(tmp_path, packer, 192, 256)
    fields = Fields({"quantization_config": dict(packer.config)}, tmp_path / "config.json")
    quantization = read_quantization(fields, tmp_path)
    inputs = all_of(256)
    wanted = read(tmp_path, packer, all_of(192), inputs)
    source = DummyWeights(0, torch.bfloat16)
    scheme = AtLoad(quantization.scheme(NAME, "gate_up_proj", source))
    assert quantization.bits >= 4
    for role in ("lm_head", "router", "embed_tokens"):
        assert quantization.scheme(f"model.{role}", role, source) == DENSE

    def place(device: str) -> Any:
        return all_of(192), inputs, torch.bfloat16, torch.device(device)

    def made(device: str) -> Any:
        return scheme.linear([Part(source, "l", NAME, *place(device))])

    def shown(weight: Any) -> list[Any]:
        return [
            one if one is None else (one.dtype, one.shape, one.stride()) for one in weight.tensors
        ]

    for weight in (made("cpu"), made("meta")):
        assert weight.form == wanted.form
        assert shown(weight) == shown(wanted)
    with FakeTensorMode():
        assert shown(made("cpu")) == shown(wanted)
        parts = [Part(source, "l", f"{EXPERT}{name}", *place("cpu")) for name in ("gate", "up")]
        assert scheme.linear(parts).form == wanted.form
    values = made("cpu").dequantized(slice(None), torch.float32)
    dense = torch.empty(192, 256, dtype=torch.bfloat16)
    source.fill(f"{NAME}.weight", dense, dense.shape)
    error = (values - dense.float()).abs().max()
    assert 0 < float(error) < 0.02  # of weights with a standard deviation of 0.02


@pytest.mark.parametrize("name", sorted(name for name, one in PACKERS.items() if one.rounded))
def test_a_product_rounds_its_inputs_by_the_rule_of_the_checkpoint(tmp_path, name):
    packer = PACKERS[name]
    module = write(tmp_path, packer, 192, 256)
    weight = read(tmp_path, packer, all_of(192), all_of(256))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 256, generator=generator)
    x[4] = 0
    out = torch.full((9, 192), torch.nan)
    weight.product(x, out, None)
    exact = packer.rounded(x.double(), module) @ module.weight.T
    # A code may be the neighbour where float32 and float64 round a scale differently: one in
    # thousands, each changes a sum by at most 1/16 of one product.
    error = (out.double() - exact).abs() / exact.abs().amax(1, keepdim=True).clamp(min=1e-30)
    assert float(error.max()) < 0.01
    assert float(error.median()) < 1e-6
