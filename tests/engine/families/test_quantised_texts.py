"""Quantised models of texts and images: their lists name modules as one version or the other."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from packers.compressed_tensors import of_8_bits
from safetensors.torch import load_file, save_file
from tiny_answers import EXACT, ask, draw_prompts, serve

PACKER = of_8_bits("float-quantized", "float", "channel", "none", 0)
LEFT_OUT = "layers.0.mlp.down_proj"


def written(original, folder, tensors, **more):
    shutil.copytree(original, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    save_file(tensors, folder / "model.safetensors")
    return serve(folder)


@pytest.fixture
def packed_and_plain(made, tmp_path):
    """Return a function to engines of a quantised checkpoint and of its weights as floats."""

    def make(name, ignored):
        folder, _ = made(name)
        draw = torch.Generator().manual_seed(1)
        packed = load_file(folder / "model.safetensors")
        plain = dict(packed)
        for key in [key for key in packed if "language_model" in key and "_proj." in key]:
            if LEFT_OUT not in key:
                module = PACKER.pack(packed.pop(key).double(), draw)
                plain[key] = module.weight.float()
                packed |= {
                    key.replace("weight", suffix): tensor.contiguous()
                    for suffix, tensor in module.tensors.items()
                }
        ignore = [f"{ignored}.{LEFT_OUT}", "re:.*vision_tower.*", "re:.*lm_head"]
        config = {**PACKER.config, "ignore": ignore}
        return (
            written(folder, tmp_path / "packed", packed, quantization_config=config),
            written(folder, tmp_path / "plain", plain),
        )

    return make


@pytest.mark.parametrize("name", ["gemma3-with-images", "gemma3-with-images-new-names"])
@pytest.mark.parametrize("ignored", ["language_model.model", "model.language_model"])
def test_a_list_of_modules_names_them_in_either_spelling(packed_and_plain, name, ignored):
    ours, theirs = (ask(llm, draw_prompts((3, 21))) for llm in packed_and_plain(name, ignored))
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        for mine, its in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert mine.keys() == its.keys()
            assert max(abs(mine[at].logprob - its[at].logprob) for at in mine) <= EXACT
