"""A new format of quantised checkpoints is one new file: its weights, its scheme, its config."""

from __future__ import annotations

import sys

import pytest
import torch
from emulated_models import Emulated
from packers.packer import Packed, Packer
from quantised_adapters import write_adapter
from quantised_answers import ask, assert_agrees, draw_prompts, serve
from quantised_folders import write

from kiln.engine.errors import ConfigError, ModelError
from kiln.engine.models import formats
from kiln.engine.models.quantization import known_formats

MODULE = '''
"""Weights of -1, 0 and 1, four in a byte, with a scale for each output: codes - 1 times scale."""

from dataclasses import dataclass

import torch

from kiln.engine.layers.weight import Weight
from kiln.engine.models.fp8_schemes import with_room
from kiln.engine.models.quantization import Format, Quantization, refuse_others
from kiln.engine.models.scheme import DENSE, Scheme


@dataclass(frozen=True, slots=True)
class TernaryWeight(Weight):
    codes: torch.Tensor  # [..., out, in] int8
    scales: torch.Tensor  # [..., out, 1]

    @property
    def out_features(self):
        return self.codes.shape[-2]

    def dequantized(self, outputs, dtype):
        return (self.codes[..., outputs, :] * self.scales[..., outputs, :]).to(dtype)

    def describe(self):
        return "ternary"


@dataclass(frozen=True, slots=True)
class Ternary(Scheme):
    def read(self, part):
        outputs, inputs = part.outputs, part.inputs
        size = (outputs.whole, inputs.whole // 4)
        packed = part.tensor("fours", size, (torch.uint8,), (outputs.place,))
        codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1)
        if bool((codes == 3).any()):
            raise part.error("fours", "holds the code 3: want 0, 1 or 2")
        own = (codes.to(torch.int8) - 1)[:, inputs.place].contiguous()
        scales = part.scales("scale", (outputs.whole, 1), (outputs.place,))
        return TernaryWeight(with_room(own, inputs.room), scales)

    def quantized(self, values):
        scales = values.abs().mean(1, keepdim=True).float()
        return TernaryWeight((values / scales).round().clamp(-1, 1).to(torch.int8), scales)


@dataclass(frozen=True)
class Of(Quantization):
    method = "ternary"
    bits = 2.0

    def scheme(self, name, role, source):
        inside = role in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        return Ternary() if inside else DENSE


def read(fields):
    refuse_others(fields, ("quant_method",))
    return Of()


FORMAT = Format("ternary", read)
'''


def pack(weight: torch.Tensor, generator: torch.Generator) -> Packed:
    """Pack by the rule of the module above."""
    scale = weight.abs().mean(1, keepdim=True).half()
    codes = (weight / scale).round().clamp(-1, 1)
    fours = (codes + 1).to(torch.uint8).view(len(codes), -1, 4)
    tensors = {"fours": sum(fours[..., at] << 2 * at for at in range(4)), "scale": scale}
    return Packed(tensors, codes * scale.double())


@pytest.fixture
def ternary(tmp_path, monkeypatch):
    """Add the module to Kiln's formats, and return a function that writes a checkpoint."""
    folder = tmp_path / "formats"
    folder.mkdir()
    (folder / "ternary_trial.py").write_text(MODULE)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(folder)])
    known_formats.cache_clear()
    packer = Packer("ternary", {"quant_method": "ternary"}, pack)
    yield lambda family: write(tmp_path / family, packer, family)
    known_formats.cache_clear()
    del sys.modules[f"{formats.__name__}.ternary_trial"]


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_a_module_in_the_folder_of_formats_serves_its_checkpoints(ternary, family):
    made = ternary(family)
    assert_agrees(Emulated(made), ask(serve(made.folder), draw_prompts(), whole=True))
    assert ask(serve(made.folder, load_format="dummy"), draw_prompts((3,)))


def test_adapters_graphs_and_chunks_need_nothing_of_it(ternary, tmp_path, environment):
    environment(KILN_CPU_GRAPHS="emulate", KILN_GRAPH_STRICT="1", KILN_GRAPH_VERIFY="off")
    made = ternary("llama")
    adapter = write_adapter(tmp_path / "own", made, 5, ("q_proj", "v_proj", "down_proj"))
    llm = serve(
        made.folder,
        lora_modules={"own": str(tmp_path / "own")},
        cuda_graph_bs=[1, 4],
        max_num_batched_tokens=16,
        max_num_seqs=4,
    )
    answers = ask(llm, draw_prompts((3, 18, 1, 11)), lora=["own", None, "own", None])
    plain, own = Emulated(made), Emulated(made, adapter=adapter)
    assert_agrees([own, plain, own, plain], answers)


def test_its_errors_are_refusals_by_name(ternary):
    made = ternary("llama")
    with pytest.raises(ConfigError, match=r"quantised already, by 'ternary': leave"):
        serve(made.folder, quantization="fp8")
    path = made.folder / "config.json"
    path.write_text(path.read_text().replace('"ternary"}', '"ternary", "sparse": 2}'))
    with pytest.raises(ModelError, match=r"quantization_config\.sparse is 2"):
        serve(made.folder)


def test_without_the_file_its_checkpoints_are_refused(tmp_path):
    made = write(tmp_path, Packer("ternary", {"quant_method": "ternary"}, pack), "llama")
    with pytest.raises(ModelError, match=r"quant_method is 'ternary', Kiln supports .*fp8"):
        serve(made.folder)
