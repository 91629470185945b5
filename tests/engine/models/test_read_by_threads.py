"""Models whose weights threads read equal those whose files are mapped, whole and by rank."""

from __future__ import annotations

import pytest
import torch
from late_copier import PromptCopier

from kiln.engine.compile.parameters import named_tensors
from kiln.engine.models import staged_copies
from kiln.engine.models.loader import load_model
from kiln.engine.models.registry import read_model
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.split import WHOLE, Split

CPU = torch.device("cpu")


@pytest.fixture
def folder(request, tmp_path, small_config):
    import transformers

    family, fused = request.param
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config").from_dict(
        small_config(f"{family}ForCausalLM")
    )
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(tmp_path, save_original_format=not fused, max_shard_size="20KB")
    return tmp_path


def tensors(folder, copier, split):
    family, config = read_model(folder)
    weights = SafetensorsWeights(folder, copier)
    return named_tensors(load_model(family, config, weights, 64, torch.float32, CPU, split=split))


@pytest.mark.parametrize(
    "folder", [("Llama", False), ("Mixtral", False), ("Mixtral", True)], indirect=True, ids=str
)
def test_every_tensor_is_the_same_on_one_rank_and_on_two(folder, monkeypatch):
    monkeypatch.setattr(staged_copies, "_LEAST", 64)
    for split in (WHOLE, Split(0, 2, "sums"), Split(1, 2, "sums")):
        mapped, read = (tensors(folder, copier, split) for copier in (None, PromptCopier()))
        assert mapped.keys() == read.keys()
        assert all(torch.equal(mapped[name], read[name]) for name in mapped)
