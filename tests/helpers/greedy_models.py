"""Tiny models of every family, whose greedy tokens are compared with those of transformers."""

from __future__ import annotations

from typing import Any

COMMON = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
STRETCHED = {"rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-biases": (
        "Llama",
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-one-kv-head-tied-gelu": (
        "Llama",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    "llama-rope-llama3": (
        "Llama",
        {
            "rope_parameters": {
                **STRETCHED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            },
        },
    ),
    "llama-rope-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
    ),
    "llama-rope-yarn": (
        "Llama",
        {"rope_parameters": {**STRETCHED, "rope_type": "yarn"}, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "mistral-wide-heads": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 10, "num_hidden_layers": 3}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows-from-layer-1": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3-tied-biases": (
        "Qwen3",
        {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": 12}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56, "num_hidden_layers": 3,
            "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
            "norm_topk_prob": True, "mlp_only_layers": [0], "head_dim": 32,
            "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1,
        },
    ),
}  # fmt: skip
