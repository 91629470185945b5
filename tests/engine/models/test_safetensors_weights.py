"""Weights on disk: whole, sharded, and broken in every way that a download breaks."""

from __future__ import annotations

import json
import os

import pytest
import torch
from late_copier import LateCopier, PromptCopier
from projections import whole_projection
from safetensors.torch import save_file

from kiln.engine.errors import ModelError
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.parameters import Parameters
from kiln.engine.models.quantization import UNQUANTIZED
from kiln.engine.models.safetensors_weights import SafetensorsWeights

CPU = torch.device("cpu")
TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.weight": torch.arange(12.0).view(4, 3) + 100,
    "norm": torch.ones(5, dtype=torch.bfloat16) * 3,
}


@pytest.fixture
def single(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    names = list(TENSORS)
    files = {"model-1-of-2.safetensors": names[:1], "model-2-of-2.safetensors": names[1:]}
    for file, held in files.items():
        save_file({name: TENSORS[name] for name in held}, tmp_path / file)
    placed = {name: file for file, held in files.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return tmp_path


def load(folder, copier=None):
    return SafetensorsWeights(folder, copier)


@pytest.fixture(params=[None, PromptCopier], ids=["mapped", "by-threads"])
def copier(request):
    return request.param and request.param()


def tensor(weights, name, *shape):
    return Parameters(weights, UNQUANTIZED, torch.float32, CPU).tensor(name, *shape)


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_one_file_and_shards_give_the_same(layout, request, copier):
    weights = load(request.getfixturevalue(layout), copier)
    linear = Parameters(weights, UNQUANTIZED, torch.float32, CPU).linear(
        whole_projection("ab", {"a": 2, "b": 4}, 3)
    )
    assert torch.equal(linear.weight.values, torch.cat([TENSORS["a.weight"], TENSORS["b.weight"]]))
    assert linear.bias is None
    norm = tensor(weights, "norm", 5)
    assert norm.dtype == torch.float32
    assert torch.equal(norm, TENSORS["norm"].float())
    weights.finish()


def test_tensors_do_not_depend_on_the_file_once_read(single):
    weights = load(single)
    taken = tensor(weights, "a.weight", 2, 3)
    (single / "model.safetensors").write_bytes(b"\0" * 10)
    assert torch.equal(taken, TENSORS["a.weight"])


def test_a_missing_tensor_is_named(single):
    with pytest.raises(ModelError, match=r"tensor c\.weight is missing"):
        tensor(load(single), "c.weight", 2)


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 4), (2, 3, 1)])
def test_another_shape_is_refused_with_both_shapes(single, shape, copier):
    wanted = r"model\.safetensors: tensor a\.weight is F32 \[2, 3\], config\.json implies"
    with pytest.raises(ModelError, match=wanted) as caught:
        tensor(load(single, copier), "a.weight", *shape)
    assert str(list(shape)) in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_tensor_is_refused_by_the_layer_that_wants_it(tmp_path, dtype):
    save_file({"a.weight": torch.ones(4, 2).to(dtype)}, tmp_path / "model.safetensors")
    weights = load(tmp_path)
    assert weights.dtype("a.weight") == dtype
    with pytest.raises(ModelError, match=rf"layers\.0\.o_proj: tensor a\.weight is {dtype}, but"):
        Parameters(weights, UNQUANTIZED, torch.float32, CPU).linear(
            whole_projection("layers.0.o_proj", {"a": 4}, 2)
        )


@pytest.mark.parametrize(
    "index", [(slice(1, 3),), (slice(None), slice(1, 2)), (slice(3, None), slice(0, 2))]
)
def test_a_part_is_that_of_the_whole_in_the_dtype_of_out(single, index, copier):
    weights, whole = load(single, copier), TENSORS["b.weight"]
    part = torch.full(whole[index].shape, float("nan"), dtype=torch.float64)
    weights.fill("b.weight", part, (4, 3), index)
    assert torch.equal(part, whole[index].double())
    assert (weights.dtype("b.weight"), weights.dtype("norm")) == (torch.float32, torch.bfloat16)


def test_only_the_part_is_read(single, monkeypatch):
    """A rank's share of a tensor: safetensors is asked for the slice, not for the whole."""
    weights, asked = load(single), []
    find = weights._find_tensor

    class Spy:
        def __init__(self, part):
            self.get_shape, self.get_dtype = part.get_shape, part.get_dtype
            self.part = part

        def __getitem__(self, index):
            asked.append(index)
            return self.part[index]

    def spying(name):
        path, part = find(name)
        return path, Spy(part)

    monkeypatch.setattr(weights, "_find_tensor", spying)
    weights.fill("b.weight", torch.empty(2, 3), (4, 3), (slice(2, 4),))
    assert asked == [(slice(2, 4),)]


@pytest.mark.parametrize(
    ("sizes", "index"),
    [((2, 3), ()), ((4, 3), (slice(2),)), ((1, 3), (slice(2),)), ((4,), (slice(4),) * 3)],
)
def test_a_part_of_another_size_than_out_is_refused(single, sizes, index):
    weights = [load(single), DummyWeights(0, torch.float32)]
    for source in weights:
        with pytest.raises(ValueError, match=r"b\.weight: out is"):
            source.fill("b.weight", torch.empty(sizes), (4, 3), index)


def test_a_file_that_shrinks_while_it_is_loaded_is_an_error(sharded, copier):
    weights, path = load(sharded, copier), sharded / "model-2-of-2.safetensors"
    tensor(weights, "a.weight", 2, 3)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(
        ModelError, match=rf"{path.name}: tensor b\.weight cannot be read \(the file"
    ):
        tensor(weights, "b.weight", 4, 3)


def test_a_file_that_is_replaced_while_it_is_loaded_is_an_error(single):
    weights, path = load(single, PromptCopier()), single / "model.safetensors"
    save_file({"b.weight": torch.ones(400)}, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)
    with pytest.raises(ModelError, match=r"tensor b\.weight cannot be read \(the file has changed"):
        tensor(weights, "b.weight", 4, 3)


def test_when_it_is_finished_all_copies_are(sharded):
    weights = load(sharded, LateCopier(1))
    made = {name: torch.zeros_like(one) for name, one in TENSORS.items()}
    for name, out in made.items():
        weights.fill(name, out, out.shape)
    weights.finish()
    assert all(torch.equal(made[name], TENSORS[name]) for name in TENSORS)


def test_progress_is_what_was_read_of_all_bytes(sharded, copier):
    weights = load(sharded, copier)
    whole = sum(path.stat().st_size for path in sharded.glob("*.safetensors"))
    assert weights.progress == (0, whole)
    tensor(weights, "norm", 5)
    weights.fill("b.weight", torch.empty(2, 3, dtype=torch.float16), (4, 3), (slice(2),))
    assert weights.progress == (5 * 2 + 6 * 4, whole)


def test_leftover_tensors_show_that_the_config_is_wrong(single):
    weights = load(single)
    tensor(weights, "a.weight", 2, 3)
    weights.ignore("norm")
    with pytest.raises(ModelError, match=r"does not use 1 tensors, such as b\.weight"):
        weights.finish()


def test_buffers_of_old_exports_are_no_leftovers(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({name: torch.ones(4)}, tmp_path / "model.safetensors")
    load(tmp_path).finish()


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2-of-2\.safetensors: this shard is missing"):
        load(sharded)


def test_a_shard_without_the_tensor_that_the_index_places_there_is_named(sharded):
    save_file({"other": torch.ones(1)}, sharded / "model-1-of-2.safetensors")
    with pytest.raises(ModelError, match=r"model-1-of-2\.safetensors: tensor a\.weight is missing"):
        load(sharded)


@pytest.mark.parametrize("keep", [0, 4, 7, 30, -1])
def test_a_truncated_file_is_named(single, keep):
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a complete safetensors file"):
        load(single)


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"\xff" * 100, b"<html>"],
    ids=["lfs-pointer", "ff", "html"],
)
def test_another_file_under_that_name_is_named(single, content):
    (single / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        load(single)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../x"}}',
        '{"weight_map": {"a": 3}}',
    ],
)
def test_a_broken_index_is_named(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)


def test_two_sets_of_weights_in_one_folder_are_refused(sharded, tmp_path):
    index = "model.safetensors.index.json"
    save_file(TENSORS, sharded / "model.safetensors")
    with pytest.raises(ModelError, match=rf"model\.safetensors and {index}, which lists other"):
        load(sharded)
    listed = dict.fromkeys(TENSORS, "model.safetensors")
    (sharded / index).write_text(json.dumps({"weight_map": listed}))
    load(sharded)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(ModelError, match="no weights found"):
        load(tmp_path)


@pytest.mark.parametrize("other", ["pytorch_model.bin", "model-00001-of-00002.safetensors"])
def test_weights_in_another_form_are_mentioned(tmp_path, other):
    (tmp_path / other).write_bytes(b"")
    with pytest.raises(ModelError, match=other):
        load(tmp_path)
