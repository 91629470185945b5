"""Cohere-2."""

from __future__ import annotations

from tiny.model import Tiny


def as_older_files(content):
    """Write the pattern instead of the layers, and keys that nothing reads."""
    del content["layer_types"]
    theta = content.pop("rope_parameters")["rope_theta"]
    content |= {"rope_theta": theta, "sliding_window_pattern": 2, "rotary_pct": 1.0}
    content |= {"position_embedding_type": "rope_gptj", "use_parallel_block": True}


MODELS = [
    Tiny("cohere2", "Cohere2Config", {"num_hidden_layers": 5, "sliding_window": 11}),
    Tiny(
        "cohere2-older-biases",
        "Cohere2Config",
        {
            "num_hidden_layers": 4, "sliding_window": 9, "attention_bias": True,
            "logit_scale": 0.25, "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
        },
        edit=as_older_files,
    ),
]  # fmt: skip
