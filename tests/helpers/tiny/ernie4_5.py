"""Ernie-4.5: with biases in every layer or none, with experts in some layers."""

from __future__ import annotations

from typing import Any

from tiny.model import ATTENTION, Tiny

SPARSE = {
    "num_hidden_layers": 3,
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 28,
    "moe_norm_min": 0.7,
}


def older(content: dict[str, Any]) -> None:
    """Write what files of 2025 have."""
    content["architectures"] = ["Ernie4_5_ForCausalLM"]
    content["rope_theta"] = content.pop("rope_parameters")["rope_theta"]


def older_sparse(content: dict[str, Any]) -> None:
    """Do the same with experts."""
    content["rope_theta"] = content.pop("rope_parameters")["rope_theta"]
    content.update(moe_use_aux_free=True, moe_capacity=[64, 64, 64], moe_layer_end_index=-1)


MODELS = [
    Tiny("ernie4_5", "Ernie4_5Config", {"head_dim": 32, "use_bias": True}),
    Tiny(
        "ernie4_5-older", "Ernie4_5Config",
        {
            "tie_word_embeddings": False, "num_attention_heads": 6, "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
        older,
    ),
    Tiny("ernie4_5-moe", "Ernie4_5_MoeConfig", SPARSE, older_sparse, targets=ATTENTION),
    Tiny(
        "ernie4_5-moe-some-layers", "Ernie4_5_MoeConfig",
        {
            **SPARSE, "moe_layer_start_index": 0, "moe_layer_end_index": 1,
            "moe_layer_interval": 2, "moe_num_shared_experts": 0, "tie_word_embeddings": False,
        },
        targets=ATTENTION,
    ),
]  # fmt: skip
