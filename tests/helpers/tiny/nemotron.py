"""Nemotron-4 and Minitron."""

from __future__ import annotations

from tiny.model import ATTENTION, Tiny

PLAIN = (*ATTENTION, "up_proj", "down_proj")

MODELS = [
    Tiny("nemotron", "NemotronConfig", {"head_dim": 24}, targets=PLAIN),
    Tiny(
        "nemotron-biases-quarter",
        "NemotronConfig",
        {
            "attention_bias": True, "mlp_bias": True, "hidden_act": "silu", "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0,
                                "partial_rotary_factor": 0.25},
        },
        targets=PLAIN,
    ),
]  # fmt: skip
