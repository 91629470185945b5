"""Scales of keys and values: every spelling is read for a pool of 8-bit floats, else ignored."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from depth import at_depth
from packers.packer import all_packers
from quantised_folders import families_of, write
from safetensors.torch import load_file, save_file

from kiln.engine.errors import ModelError
from kiln.engine.models.loader import load_model
from kiln.engine.models.registry import read_model
from kiln.engine.models.renamed_weights import HeadlessWeights
from kiln.engine.models.safetensors_weights import SafetensorsWeights

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
FILE = "model.safetensors"
SPELLINGS = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "autofp8": ("k_proj.output_scale", "v_proj.output_scale"),
    "both": ("kv_scale", "kv_scale"),
}


@pytest.fixture
def saved(random_llama, tmp_path):
    """Return a function that saves a model of two layers with more tensors in its attention."""

    def save(*layers):
        shutil.copy(random_llama[1] / "config.json", tmp_path)
        tensors = load_file(random_llama[1] / FILE)
        for index, more in enumerate(layers):
            prefix = f"model.layers.{index}.self_attn."
            tensors |= {prefix + name: tensor.clone() for name, tensor in more.items()}
        save_file(tensors, tmp_path / FILE)
        return tmp_path

    return save


def scales(folder, kv_dtype=E4M3, source=SafetensorsWeights):
    """The scales of each attention layer of a model; loading it leaves no tensor over."""
    family, config = read_model(folder)
    model = load_model(family, config, source(folder), 64, torch.float32, CPU, kv_dtype=kv_dtype)
    return [(layer.k_scale, layer.v_scale) for layer in model.attention_layers]


@pytest.mark.quick(4)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("shape", [(), (1,)], ids=["no-dimension", "one-element"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_each_layer_has_its_own_scales_in_any_spelling(saved, spelling, shape, dtype):
    key, value = SPELLINGS[spelling]
    numbers = torch.tensor([0.0371, 1.7, 0.25, 33.3], dtype=torch.float64).to(dtype)
    stored = [one.expand(shape) for one in numbers]
    folder = saved({value: stored[1], key: stored[0]}, {value: stored[3], key: stored[2]})
    first, second, third, fourth = numbers.float().tolist()
    same = key == value
    assert scales(folder) == [
        (first, first if same else second),
        (third, third if same else fourth),
    ]
    for other in (None, torch.float32, torch.bfloat16):
        assert scales(folder, other) == [(1.0, 1.0)] * 2


def test_a_layer_without_scales_has_those_of_one(saved):
    one = torch.tensor(0.5)
    assert scales(saved()) == [(1.0, 1.0)] * 2
    assert scales(saved({}, {"k_scale": one, "v_scale": one})) == [(1.0, 1.0), (0.5, 0.5)]


def test_scales_of_queries_and_weights_are_ignored(saved):
    one = torch.tensor([float("nan")])
    others = {"q_scale": one, "q_proj.q_scale": one, "prob_scale": one}
    found = {"k_scale": torch.tensor([2.0]), "v_scale": torch.tensor([3.0])}
    folder = saved({**others, **found}, others)
    assert scales(folder) == [(2.0, 3.0), (1.0, 1.0)]
    assert scales(folder, torch.bfloat16) == [(1.0, 1.0)] * 2


@pytest.mark.parametrize("name", at_depth(["fp8-tensor"], sorted(all_packers())))
def test_quantised_weights_do_not_change_how_they_are_read(tmp_path, name):
    packer = all_packers()[name]
    folder = write(tmp_path, packer, families_of(packer)[0]).folder
    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    key, value = SPELLINGS["modelopt"]
    tensors = load_file(folder / FILE)
    for layer in range(num_layers):
        place = f"model.layers.{layer}.self_attn."
        tensors |= {place + key: torch.tensor(0.5), place + value: torch.tensor(0.25)}
    save_file(tensors, folder / FILE)
    assert scales(folder) == [(0.5, 0.25)] * num_layers
    assert scales(folder, torch.bfloat16) == [(1.0, 1.0)] * num_layers


def test_a_model_that_ends_at_its_hidden_states_has_them_too(saved):
    folder = saved(*[{"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)}] * 2)
    tensors = load_file(folder / FILE)
    save_file({name.removeprefix("model."): one for name, one in tensors.items()}, folder / FILE)

    def headless(folder):
        return HeadlessWeights(SafetensorsWeights(folder))

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert scales(folder, source=headless) == [(0.5, 0.25)] * 2
    assert scales(folder, torch.bfloat16, headless) == [(1.0, 1.0)] * 2


ONE = torch.tensor([1.0])
WIDE = torch.tensor([1.0], dtype=torch.float64)
DAMAGED = {
    "nan": ({"k_scale": ONE * float("nan"), "v_scale": ONE}, r"k_scale, .* is nan"),
    "infinite": ({"k_scale": ONE, "v_scale": ONE / 0}, r"v_scale, .* is inf"),
    "zero": ({"kv_scale": ONE * 0}, r"kv_scale, .* is 0\.0"),
    "negative": ({"k_proj.k_scale": -ONE, "v_proj.v_scale": ONE}, r"k_proj\.k_scale, .* is -1\.0"),
    "too-small": ({"k_scale": WIDE * 1e-60, "v_scale": ONE}, r"k_scale, .* is 1e-60: want"),
    "too-large": ({"k_scale": WIDE * 1e40, "v_scale": ONE}, r"k_scale, .* is 1e\+40: want"),
    "integer": ({"kv_scale": ONE.int()}, r"kv_scale, .* is int32 \[1\]"),
    "8-bits": ({"kv_scale": ONE.to(E4M3)}, r"kv_scale, .* is float8_e4m3fn \[1\]"),
    "per-head": (
        {"k_scale": torch.ones(2, 1, 1), "v_scale": torch.ones(2, 1, 1)},
        r"k_scale, .* is float32 \[2, 1, 1\]: Kiln has one .* for all heads",
    ),
    "vector": (
        {"k_proj.output_scale": ONE, "v_proj.output_scale": torch.ones(2)},
        r"v_proj\.output_scale, .* is float32 \[2\]",
    ),
    "empty": ({"k_scale": torch.ones(0), "v_scale": ONE}, r"k_scale, .* is float32 \[0\]"),
    "half": ({"k_proj.k_scale": ONE}, r"v_proj\.v_scale is missing"),
    "other-half": ({"v_scale": ONE}, r"k_scale is missing"),
    "two-that-differ": (
        {"k_scale": ONE, "v_scale": ONE, "kv_scale": ONE * 2},
        r"k_scale and .*v_scale are \(1\.0, 1\.0\), but .*kv_scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_scale_is_refused_by_name_unless_the_pool_needs_none(saved, name):
    more, message = DAMAGED[name]
    folder = saved({}, more)
    with pytest.raises(ModelError, match=rf"tensors? model\.layers\.1\.self_attn\.{message}"):
        scales(folder)
    assert scales(folder, torch.bfloat16) == [(1.0, 1.0)] * 2


def test_two_spellings_may_say_the_same(saved):
    both = {"k_scale": ONE * 2, "v_scale": ONE * 2, "kv_scale": (ONE * 2).bfloat16()}
    assert scales(saved(both, both)) == [(2.0, 2.0)] * 2
