"""The headers of a checkpoint's files tell what its model lacks, in every format, unread."""

from __future__ import annotations

import json

import pytest
import torch
from packers.packer import all_packers
from quantised_folders import families_of, write_folder
from safetensors.torch import load_file

from kiln.engine.models.header_weights import HeaderWeights, SoundValues
from kiln.engine.models.loader import load_model
from kiln.engine.models.registry import read_model
from kiln.engine.models.safetensors_weights import SafetensorsWeights

CASES = [
    (packer, family)
    for packer in sorted(all_packers())
    for family in families_of(all_packers()[packer])
]


class Noted(SafetensorsWeights):
    """``asked``: the names, shapes and places that were read."""

    def __init__(self, folder):
        super().__init__(folder)
        self.asked = set()

    def fill(self, name, out, shape, index=()):
        super().fill(name, out, shape, index)
        self.asked.add((name, tuple(shape), str(index)))


def by_headers(folder):
    """Return the source and the problems of a folder's model."""
    family, config = read_model(folder)
    source = Noted(folder)
    headers = HeaderWeights(source)
    with SoundValues():
        load_model(family, config, headers, 1, torch.float32, torch.device("meta"))
    return source, headers.problems


@pytest.mark.quick(12)
@pytest.mark.parametrize(("packer", "family"), CASES)
def test_a_model_without_values_asks_for_what_a_model_with_values_does(packer, family, quantised):
    folder = quantised(packer, family).folder
    source, problems = by_headers(folder)
    assert problems == []
    assert source.progress[0] < 1000, "but for a few numbers that describe others"
    read = Noted(folder)
    load_model(*read_model(folder), read, 1, torch.float32, torch.device("cpu"))
    assert source.asked == read.asked


@pytest.mark.quick(6)
@pytest.mark.parametrize(("packer", "family"), CASES)
def test_all_that_is_missing_or_of_another_shape_or_left_over_is_named(
    packer, family, quantised, tmp_path
):
    made = quantised(packer, family)
    tensors = load_file(made.folder / "model.safetensors")
    first = "model.layers.1.input_layernorm.weight"
    some = [name for name in sorted(tensors) if ".1.self_attn." in name and name.endswith("weight")]
    lost = [first, "model.norm.weight", *some[:1]]
    for name in lost:
        del tensors[name]
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(3)
    tensors["model.other"] = torch.ones(3)
    config = json.loads((made.folder / "config.json").read_text())
    write_folder(tmp_path / "own", config, tensors)
    _, problems = by_headers(tmp_path / "own")
    text = "\n".join(problems)
    assert all(f"tensor {name} is missing" in text for name in lost)
    assert "tensor model.layers.0.input_layernorm.weight is F32 [3], config.json" in text
    assert "such as model.other" in text
    assert len(problems) == len(lost) + 2
