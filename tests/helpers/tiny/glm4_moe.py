"""GLM-4.5: dense layers first; groups of experts, norms and biases or none of them."""

from __future__ import annotations

from typing import Any

from tiny.model import ATTENTION, Tiny

SIZES = {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "hidden_size": 72,
    "head_dim": 20,
    "moe_intermediate_size": 28,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}


def sparse(content: dict[str, Any]) -> None:
    """Leave out what may be left out."""
    for name in ("rope_parameters", "attention_bias", "use_qk_norm", "n_group", "topk_group"):
        content.pop(name)
    for name in ("n_shared_experts", "first_k_dense_replace", "norm_topk_prob", "rms_norm_eps"):
        content.pop(name)
    content.pop("routed_scaling_factor")


def published(content: dict[str, Any]) -> None:
    """Write what files of 2025 have."""
    rope = content.pop("rope_parameters")
    content.update(
        rope_theta=rope["rope_theta"], partial_rotary_factor=rope["partial_rotary_factor"],
        rope_scaling=None, num_nextn_predict_layers=1,
    )  # fmt: skip


MODELS = [
    Tiny("glm4-moe", "Glm4MoeConfig", SIZES, sparse, targets=ATTENTION),
    Tiny(
        "glm4-moe-published", "Glm4MoeConfig",
        {
            **SIZES, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 2,
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.8,
            },
        },
        published, targets=ATTENTION,
    ),
    Tiny(
        "glm4-moe-all-sparse", "Glm4MoeConfig",
        {
            **SIZES, "first_k_dense_replace": 0, "norm_topk_prob": False, "use_qk_norm": True,
            "tie_word_embeddings": True, "routed_scaling_factor": 1.7, "hidden_act": "gelu",
        },
        targets=ATTENTION,
    ),
]  # fmt: skip
