"""Models whose rotary pairs are neighbours are put in order at load: queries, keys, biases, norms.

A tiny model is stored so, and answers as the model that it was made of.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packers.packer import all_packers
from quantised_folders import cases, write
from safetensors.torch import load_file, save_file
from tiny.model import all_tiny
from tiny_answers import ask, assert_agrees, draw_prompts, serve

from kiln.engine.models import registry
from kiln.engine.models.build import Builder
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.families import qwen3
from kiln.engine.models.registry import read_model
from kiln.engine.models.rotary_order import halves_of_pairs
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.split import Split

HEAD_DIM = 20
FORMATS = [name for name, packer in all_packers().items() if packer.packs("model.layers.0.q_proj")]


def test_the_even_dimensions_of_a_head_come_first():
    assert halves_of_pairs(2, 5, 4, 3) == (0, 2, 1, 3, 4, 5, 7, 6, 8, 9, 10, 11, 12)
    assert halves_of_pairs(0, 4, 4) == ()


@pytest.fixture
def interleaved(tmp_path, monkeypatch):
    """A folder, and what transformers computes for it once its pairs are in order."""
    one = replace(all_tiny()["qwen3"], fields={"head_dim": HEAD_DIM, "attention_bias": True})
    model = one.save(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
            order = halves_of_pairs(len(tensor) // HEAD_DIM, HEAD_DIM, HEAD_DIM)
            tensors[name] = torch.empty_like(tensor)
            tensors[name][list(order)] = tensor
    save_file(tensors, path)

    def traits(fields):
        return replace(qwen3.traits(fields), interleaved=True)

    changed = replace(qwen3.FAMILY, traits=traits)
    monkeypatch.setattr(
        registry, "known_families", lambda: dict.fromkeys(changed.architectures, changed)
    )

    def logits(token_ids, total):
        with torch.inference_mode():
            return one.logits(model, token_ids, total)

    return tmp_path, logits


def test_answers_are_those_of_pairs_in_halves(interleaved):
    folder, logits = interleaved
    assert_agrees(logits, ask(serve(folder), draw_prompts((3, 17)), whole=True))


@pytest.mark.quick(8)
@pytest.mark.parametrize(("name", "family"), cases(FORMATS))
def test_weights_of_every_format_are_put_in_order(tmp_path, name, family):
    made = write(tmp_path, all_packers()[name], family)
    config = read_model(made.folder)[1]

    def projection(split, interleaved):
        own = replace(config, traits=replace(config.traits, interleaved=interleaved))
        source = SafetensorsWeights(made.folder)
        build = Builder(own, source, 64, torch.float32, torch.device("cpu"), split=split)
        layer = LayerBuilder(build, 1).attention()
        qkv = getattr(layer, "layer", layer).qkv
        every = qkv.weight.dequantized(slice(None), torch.float32)
        return every, qkv.bias

    for split in (Split(), Split(1, 2, "tp")):
        stored, ordered = (projection(split, interleaved) for interleaved in (False, True))
        heads, kv_size = 10 // split.world, 64 // split.world
        order = list(halves_of_pairs(heads, 32, 32, kv_size))
        assert order != sorted(order)
        assert torch.equal(ordered[0], stored[0][order])
        if stored[1] is not None:
            assert torch.equal(ordered[1], stored[1][order])
