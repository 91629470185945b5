"""GLM-4 of both years."""

from __future__ import annotations

from tiny.model import ATTENTION, Tiny

FUSED = (*ATTENTION, "gate_up_proj", "down_proj")
SIZES = {"head_dim": 24, "num_hidden_layers": 3}

MODELS = [
    Tiny("glm4", "Glm4Config", SIZES, targets=FUSED),
    Tiny(
        "glm4-no-biases-whole-heads",
        "Glm4Config",
        {**SIZES, "attention_bias": False, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                             "partial_rotary_factor": 1.0}},
        targets=FUSED,
    ),
    Tiny(
        "glm",
        "GlmConfig",
        {**SIZES, "head_dim": 32, "num_key_value_heads": 4},
        edit=lambda content: content.pop("rope_parameters"),
        targets=FUSED,
    ),
]  # fmt: skip
