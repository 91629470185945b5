"""SmolLM3, Seed-OSS, EXAONE-4, Granite-3 and 4, and Ministral of 2024."""

from __future__ import annotations

from typing import Any

from tiny.model import ATTENTION, Tiny

FULL, SLIDING = "full_attention", "sliding_attention"
STRETCHED = {"rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {**STRETCHED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Granite-4 without experts and state layers, whose sizes its config class checks all the same.
HYBRID = {"num_local_experts": 0, "shared_intermediate_size": 72, "mamba_n_heads": 8}
FUSED = (*ATTENTION, "input_linear", "output_linear")


def silent(*names: str) -> Any:
    """Return an edit that takes keys out of config.json: their defaults are what was saved."""

    def edit(content: dict[str, Any]) -> None:
        for name in names:
            del content[name]

    return edit


def lettered(content: dict[str, Any]) -> None:
    """Give the pattern of windows as text, without a kind for each layer."""
    del content["layer_types"]
    content["sliding_window_pattern"] = "LLG"


MODELS = [
    Tiny("smollm3", "SmolLM3Config", {"num_hidden_layers": 5},
         edit=silent("no_rope_layers", "layer_types")),
    Tiny(
        "smollm3-windows-biases", "SmolLM3Config",
        {
            "num_hidden_layers": 3, "no_rope_layers": [0, 1, 0], "use_sliding_window": True,
            "sliding_window": 7, "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    Tiny(
        "smollm3-layer-types", "SmolLM3Config",
        {
            "num_hidden_layers": 4, "no_rope_layer_interval": 2, "use_sliding_window": True,
            "sliding_window": 11, "layer_types": [SLIDING, FULL, FULL, SLIDING],
            "rope_parameters": {**STRETCHED, "rope_type": "yarn"}, "num_attention_heads": 8,
        },
    ),
    Tiny("seed-oss", "SeedOssConfig", {"head_dim": 24}),
    Tiny(
        "seed-oss-other-biases", "SeedOssConfig",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "head_dim": 40},
    ),
    Tiny("exaone4", "Exaone4Config", {"num_hidden_layers": 5, "sliding_window": 9},
         edit=silent("layer_types")),
    Tiny(
        "exaone4-letters", "Exaone4Config",
        {
            "num_hidden_layers": 4, "sliding_window": 6, "head_dim": 24,
            "layer_types": [SLIDING, SLIDING, FULL, FULL], "rope_parameters": LLAMA3,
        },
        edit=lettered,
    ),
    Tiny(
        "exaone4-full", "Exaone4Config",
        {
            "sliding_window": None, "layer_types": [FULL] * 2, "tie_word_embeddings": True,
            "rope_parameters": LLAMA3, "num_key_value_heads": 1,
        },
    ),
    Tiny(
        "granite", "GraniteConfig",
        {
            "embedding_multiplier": 12.0, "attention_multiplier": 0.0625,
            "residual_multiplier": 0.22, "logits_scaling": 0.3, "tie_word_embeddings": True,
        },
        small=0.03,
    ),
    Tiny(
        "granite-biases", "GraniteConfig",
        {
            "attention_bias": True, "mlp_bias": True, "residual_multiplier": 1.7,
            "attention_multiplier": 0.4, "num_hidden_layers": 3,
        },
        edit=silent("embedding_multiplier", "logits_scaling"),
    ),
    Tiny("granite-without-factors", "GraniteConfig",
         edit=silent("embedding_multiplier", "attention_multiplier", "residual_multiplier",
                     "logits_scaling")),
    Tiny(
        "granite-hybrid", "GraniteMoeHybridConfig",
        {
            **HYBRID, "layer_types": ["attention"] * 3, "num_hidden_layers": 3,
            "position_embedding_type": "rope", "attention_bias": True, "residual_multiplier": 0.4,
            "attention_multiplier": 0.3, "embedding_multiplier": 3, "logits_scaling": 2.5,
        },
        targets=FUSED,
    ),
    Tiny("granite-hybrid-nope", "GraniteMoeHybridConfig",
         {**HYBRID, "layer_types": [FULL] * 2, "tie_word_embeddings": True},
         edit=silent("position_embedding_type"), targets=FUSED),
    Tiny(
        "ministral", "MinistralConfig",
        {"num_hidden_layers": 3, "sliding_window": 8, "layer_types": [FULL, SLIDING, FULL],
         "head_dim": 24},
    ),
]  # fmt: skip
