"""--quantization fp8: a checkpoint of floats is served as one of channel fp8 with token scales."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from depth import at_depth
from emulated_models import Emulated
from packers.packer import all_packers
from quantised_answers import ask, assert_agrees, draw_prompts, serve
from quantised_at_load import FLOATS, quantised
from quantised_folders import FAMILIES, write, write_folder

from kiln.engine.errors import ConfigError
from kiln.engine.models.loader import load_model
from kiln.engine.models.registry import read_model
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.split import Split

CPU = torch.device("cpu")
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """Return a function from a family to a checkpoint of floats, and what it is quantised to."""
    return cache(lambda family: write(tmp_path_factory.mktemp(family), FLOATS, family))


@every_family
def test_answers_are_those_of_the_codes(floats, family):
    made = floats(family)
    llm = serve(made.folder, quantization="fp8")
    assert_agrees(Emulated(made), ask(llm, draw_prompts(), whole=True))
    said = llm.core.runner.loaded.kernels["linear"]
    assert "projections in fp8, one scale per output, activations per token" in said
    assert said.endswith("dequantised for each product: slower than float32, in less memory")
    floats_alone = serve(made.folder)
    assert "linear" not in floats_alone.core.runner.loaded.kernels
    plain = ask(floats_alone, draw_prompts(), whole=True)
    with pytest.raises(AssertionError):
        assert_agrees(Emulated(made), plain)


@every_family
def test_answers_are_the_bits_of_a_packed_checkpoint_of_the_same_weights(floats, tmp_path, family):
    made, packed = floats(family), {}
    for name, module in made.modules.items():
        codes, scales = quantised(module.tensors["weight"])
        packed |= {f"{name}.weight": codes, f"{name}.weight_scale": scales}
    others = {
        name: tensor.float()
        for name, tensor in made.tensors.items()
        if name.removesuffix(".weight") not in made.modules
    }
    config = all_packers()["ct-float-quantized-float-channel-token"].config
    write_folder(tmp_path, {**made.config, "quantization_config": dict(config)}, packed | others)
    stored, at_load = (
        [
            [(at, one.logprob) for entry in output.outputs[0].logprobs for at, one in entry.items()]
            for _, output in ask(llm, draw_prompts())
        ]
        for llm in (serve(tmp_path), serve(made.folder, quantization="fp8"))
    )
    assert stored == at_load


def build(folder, split):
    family, config = read_model(folder, "fp8")
    weights = SafetensorsWeights(folder)
    return load_model(family, config, weights, 64, torch.float32, CPU, split=split)


@every_family
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_codes_are_the_same_on_any_number_of_ranks(floats, family, world):
    """A row-parallel rank has part of the inputs, with the scale of all."""
    made = floats(family)
    models = [build(made.folder, Split(rank, world, "trial")) for rank in range(world)]
    wanted = {name: quantised(made.modules[name].tensors["weight"]) for name in made.modules}

    def whole(parts, dim):
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts], dim=dim)
        return codes, [part.scales for part in parts]

    for layer in range(2):
        place, of_layer = f"model.layers.{layer}.", [model.blocks[layer] for model in models]
        attention = [getattr(block.attention, "layer", block.attention) for block in of_layer]
        mlp = [getattr(block.mlp, "layer", block.mlp) for block in of_layer]
        codes, scales = wanted[f"{place}self_attn.o_proj"]
        found, own = whole([one.output.weight for one in attention], 1)
        assert torch.equal(found, codes.view(torch.uint8))
        assert all(torch.equal(one, scales) for one in own)
        queries = [one.qkv.weight for one in attention]
        codes, scales = wanted[f"{place}self_attn.q_proj"]
        rows = 256 // world
        for rank, own in enumerate(queries):
            mine = slice(rank * rows, (rank + 1) * rows)
            assert torch.equal(own.codes[:rows].view(torch.uint8), codes[mine].view(torch.uint8))
            assert torch.equal(own.scales[:rows], scales[mine])
        if f"{place}mlp.down_proj" in wanted:
            codes, _ = wanted[f"{place}mlp.down_proj"]
            found, _ = whole([one.down.weight for one in mlp], 1)
            assert torch.equal(found, codes.view(torch.uint8))
        else:
            for expert in range(made.config["num_experts"]):
                codes, scales = wanted[f"{place}mlp.experts.{expert}.down_proj"]
                parts = [one.down.codes[expert].view(torch.uint8) for one in mlp]
                assert torch.equal(torch.cat(parts, dim=1), codes.view(torch.uint8))
                assert torch.equal(mlp[0].down.scales[expert], scales)


@pytest.mark.parametrize("dtype", at_depth(["bfloat16"], ["bfloat16", "float16"]))
def test_floats_of_16_bits_are_quantised_from_their_own_values(floats, tmp_path, dtype):
    """A model in 16 bits, of a checkpoint in 32: the codes are still those of 32."""
    made = floats("llama")
    family, config = read_model(made.folder, "fp8")
    weights = SafetensorsWeights(made.folder)
    model = load_model(family, config, weights, 64, getattr(torch, dtype), CPU)
    codes, scales = quantised(made.modules["model.layers.0.self_attn.o_proj"].tensors["weight"])
    found = model.blocks[0].attention.output.weight
    assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.scales, scales)


def test_other_names_are_refused_by_name(floats):
    folder = floats("llama").folder
    for name in ("int3", "awq", ""):
        with pytest.raises(ConfigError, match=f"quantization='{name}'.* only by 'fp8'"):
            serve(folder, quantization=name)


@pytest.mark.parametrize("name", ["awq", "gptq", "mxfp4"])
def test_a_checkpoint_of_another_method_is_not_quantised_again(tmp_path, name):
    made = write(tmp_path, all_packers()[name], "qwen3-moe")
    with pytest.raises(ConfigError, match=f"'fp8'.* quantised already, by '{name}': leave"):
        serve(made.folder, quantization="fp8")


def test_an_fp8_checkpoint_is_what_was_asked_for(tmp_path):
    made = write(tmp_path, all_packers()["fp8-blocks"], "llama")
    answers = ask(serve(made.folder, quantization="fp8"), draw_prompts())
    assert_agrees(Emulated(made), answers)
