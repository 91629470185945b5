"""Errors name the tensors of a model of texts and images as its own file does."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file, save_file
from tiny_answers import serve

from kiln.engine.errors import ModelError

OLDER, NEWER = "language_model.model.layers.1", "model.language_model.layers.1"


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("gemma3-with-images", OLDER), ("gemma3-with-images-new-names", NEWER)],
)
def test_a_tensor_is_called_as_in_its_file(made, tmp_path, name, prefix):
    folder = shutil.copytree(made(name)[0], tmp_path / "model")
    path, tensor = folder / "model.safetensors", f"{prefix}.mlp.up_proj.weight"
    tensors = load_file(path)
    one = tensors.pop(tensor)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=f"tensor {tensor} is missing"):
        serve(folder)
    save_file(tensors | {tensor: one.int()}, path)
    with pytest.raises(ModelError, match=f"tensor {tensor} is torch.int32"):
        serve(folder)
