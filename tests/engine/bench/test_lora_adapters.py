"""The random adapters of ``kiln bench lora``: every projection that an adapter may have."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from kiln.engine.bench.lora_adapters import RandomAdapter
from kiln.engine.config import EngineConfig, ModelConfig
from kiln.engine.lora.adapter import read_adapter
from kiln.engine.lora.sites import Sites
from kiln.engine.models.loader import load_model, open_weights
from kiln.engine.models.registry import read_model

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "Qwen3ForCausalLM": ({}, 14),
    "MixtralForCausalLM": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 8),
    "Qwen3MoeForCausalLM": ({**EXPERTS, "mlp_only_layers": [1]}, 11),
    "Qwen2MoeForCausalLM": ({**EXPERTS, "shared_expert_intermediate_size": 40}, 14),
}


@pytest.mark.parametrize("architecture", MODELS)
def test_an_adapter_is_on_every_projection_but_those_of_experts(architecture, tmp_path):
    changes, count = MODELS[architecture]
    content = {"architectures": [architecture], **SIZES, **changes}
    if architecture == "Qwen2MoeForCausalLM":
        del content["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    made = RandomAdapter.of_model(tmp_path, 3, torch.bfloat16)
    assert len(made.targets) == count
    made.save(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert made.num_bytes == sum(one.nbytes for one in tensors.values())
    assert {one.dtype for one in tensors.values()} == {torch.bfloat16}
    assert all(one.any() for one in tensors.values())

    # The model itself says which parts there are, and the reader checks every shape.
    family, config = read_model(tmp_path)
    weights, sites = open_weights(tmp_path, "dummy", 0, torch.float32), Sites()
    cpu = torch.device("cpu")
    load_model(family, config, weights, 64, torch.float32, cpu, lambda *_: None, sites)
    read = read_adapter("a", tmp_path / "adapter", sites, torch.float32)
    left_out = {part.name for part in sites.parts if part.row not in read.pairs}
    assert {name.rpartition(".")[2] for name in left_out} <= {
        "embed_tokens", "lm_head", "shared_expert_gate",
    }  # fmt: skip
    assert {pair.rank for pair in read.pairs.values()} == {3}
    assert {pair.scale for pair in read.pairs.values()} == {1}


def test_one_folder_is_loaded_under_several_names_with_memory_for_all():
    adapter = RandomAdapter((), 16, torch.bfloat16)
    base = EngineConfig(ModelConfig("none"))
    config = adapter.configure(base, "folder", 3)
    assert [(one.name, one.path) for one in config.lora.modules] == [
        (f"adapter-{number}", "folder") for number in (1, 2, 3)
    ]
    assert (config.lora.num_slots, config.lora.max_lora_rank) == (3, 16)
    assert config.lora.host_memory_gib == 16
    assert (config.model, config.scheduler) == (base.model, base.scheduler)
