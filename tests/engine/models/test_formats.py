"""Every packer's modules, read by Kiln's schemes: the weights are those of the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packers.packer import Packer, all_packers
from safetensors.torch import save_file

from kiln.engine.models.fields import Fields
from kiln.engine.models.quantization import read_quantization
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.scheme import Part
from kiln.engine.models.split import Share, all_of

CPU = torch.device("cpu")
PACKERS = all_packers()


def read(
    folder: Path, packer: Packer, outputs: Share, inputs: Share, name: str = "a.q_proj"
) -> Any:
    """Return a module as a rank reads it."""
    fields = Fields({"quantization_config": dict(packer.config)}, folder / "config.json")
    source = SafetensorsWeights(folder)
    scheme = read_quantization(fields, folder).scheme(name, "qkv_proj", source)
    return scheme.linear([Part(source, "l", name, outputs, inputs, torch.float32, CPU)])


def write(folder: Path, packer: Packer, outputs: int, inputs: int) -> torch.Tensor:
    """Write one module, and return its weight by the formula."""
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    packed = packer.pack(weight, generator)
    tensors = {f"a.q_proj.{suffix}": one.clone() for suffix, one in packed.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return packed.weight


@pytest.mark.parametrize("name", sorted(PACKERS))
@pytest.mark.parametrize("outputs", [64, 192, 320])
def test_a_module_is_the_formula_rounded_once(tmp_path, name, outputs):
    wanted = write(tmp_path, PACKERS[name], outputs, 256)
    weight = read(tmp_path, PACKERS[name], all_of(outputs), all_of(256))
    assert weight.out_features == outputs
    got = weight.dequantized(slice(None), torch.float32)[:, :256]
    torch.testing.assert_close(got, wanted.float(), rtol=2**-23, atol=0)
    rows = slice(7, 51)
    assert torch.equal(weight.dequantized(rows, torch.float32)[:, :256], got[rows])


@pytest.mark.parametrize("name", sorted(PACKERS))
def test_a_rank_has_its_share_of_outputs_and_inputs(tmp_path, name):
    wanted = write(tmp_path, PACKERS[name], 192, 256)
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


@pytest.mark.parametrize("name", sorted(name for name, one in PACKERS.items() if one.rounded))
def test_a_product_rounds_its_inputs_by_the_rule_of_the_checkpoint(tmp_path, name):
    packer = PACKERS[name]
    wanted = write(tmp_path, packer, 192, 256)
    weight = read(tmp_path, packer, all_of(192), all_of(256))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 256, generator=generator)
    x[4] = 0
    out = torch.full((9, 192), torch.nan)
    weight.product(x, out, None)
    module = packer.pack(
        torch.randn(
            192, 256, generator=torch.Generator().manual_seed(192 * 256), dtype=torch.float64
        ),
        generator,
    )
    exact = packer.rounded(x.double(), module) @ wanted.T
    # A code may be the neighbour where float32 and float64 round a scale differently: one in
    # thousands, each changes a sum by at most 1/16 of one product.
    error = (out.double() - exact).abs() / exact.abs().amax(1, keepdim=True).clamp(min=1e-30)
    assert float(error.max()) < 0.01
    assert float(error.median()) < 1e-6
