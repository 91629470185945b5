"""Copies of base weights in a file, and names with the adapter's: as PEFT and torch write them."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from kiln.engine.errors import AdapterError
from kiln.engine.lora.adapter import read_adapter

MODELS = ["llama", "qwen3-tied"]
EMBEDDING, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"


@pytest.fixture
def saved(made, tmp_path):
    """Return a function that saves an adapter with PEFT; it may change the base model before."""

    def save(name, targets, *, change=None, **settings):
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(made(name).folder, dtype=torch.float32)
        if change is not None:
            with torch.no_grad():
                change(base)
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied weights, and copies that are saved
            model = get_peft_model(base, config)
            model.save_pretrained(tmp_path, **settings)
        return model

    return save


@pytest.fixture
def read(made, sites, tmp_path):
    """Return a function that reads the adapter for a model."""

    def make(name, dtype=torch.float32):
        return read_adapter("mine", tmp_path, sites(made(name).folder), dtype)

    return make


@pytest.fixture
def edit(tmp_path):
    """Return a function that changes the tensors of the adapter."""

    def change(function):
        path = tmp_path / "adapter_model.safetensors"
        save_file({name: one.contiguous() for name, one in function(load_file(path)).items()}, path)

    return change


def new_tokens(model):
    model.get_input_embeddings().weight[395:] += 0.5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "embed_tokens"], ["lm_head"]])
def test_copies_that_equal_the_models_weights_are_accepted(saved, read, tmp_path, name, targets):
    saved(name, targets, save_embedding_layers=True)
    copies = [
        key for key in load_file(tmp_path / "adapter_model.safetensors") if "lora_" not in key
    ]
    assert copies, "PEFT has saved some"
    names = {"q_proj": 2, "embed_tokens": 1, "lm_head": 1}
    assert len(read(name).pairs) == sum(names[target] for target in targets)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "embed_tokens"]])
def test_a_copy_with_new_tokens_is_refused_with_its_first_row(saved, read, name, targets):
    saved(name, targets, change=new_tokens, save_embedding_layers=True)
    with pytest.raises(AdapterError) as caught:
        read(name)
    assert "LoRA adapter 'mine': " in str(caught.value)
    assert "differs from the model's, first in row 395: " in str(caught.value)
    assert "save_embedding_layers=False" in str(caught.value)


def test_a_changed_copy_of_the_head_is_refused(saved, read, edit):
    saved("llama", ["q_proj"], save_embedding_layers=True)
    edit(lambda tensors: {**tensors, f"{HEAD}.weight": tensors[f"{HEAD}.weight"] + 1})
    with pytest.raises(AdapterError, match=r"lm_head\.weight is a copy of lm_head that differs"):
        read("llama")


def test_a_copy_that_was_rounded_to_another_dtype_is_the_models(saved, read, edit):
    saved("llama", ["q_proj"], save_embedding_layers=True)
    edit(lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert len(read("llama").pairs) == 2


@pytest.mark.parametrize("adapter", ["default", "sql"])
def test_names_with_the_adapters_name_are_read_as_pefts_own(saved, read, edit, adapter):
    """As of a model's state_dict."""
    targets = ["q_proj", "embed_tokens", "lm_head"]
    model = saved("llama", targets)
    wanted = read("llama").pairs
    named = {key: value for key, value in model.state_dict().items() if "lora_" in key}
    assert any(key.endswith(".lora_A.default.weight") for key in named)
    assert f"{EMBEDDING}.lora_embedding_A.default" in named
    edit(lambda _: {key.replace("default", adapter): value for key, value in named.items()})
    found = read("llama").pairs
    assert found.keys() == wanted.keys()
    for row, pair in found.items():
        assert torch.equal(pair.a, wanted[row].a)
        assert torch.equal(pair.b, wanted[row].b)
