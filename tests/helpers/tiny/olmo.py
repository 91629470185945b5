"""OLMo-2 and OLMo-3."""

from __future__ import annotations

from typing import Any

from tiny.model import Tiny

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {
    "rope_type": "yarn", "rope_theta": 800.0, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.4,
    "original_max_position_embeddings": 32, "truncate": False,
}  # fmt: skip


def as_published(content: dict[str, Any]) -> None:
    """Give the rotary embedding the keys of transformers 4: YaRN is that of full layers."""
    content["rope_scaling"] = content.pop("rope_parameters")[FULL]
    del content["layer_types"]


MODELS = [
    Tiny("olmo2", "Olmo2Config", {"num_key_value_heads": 4}),
    Tiny(
        "olmo2-grouped-biases", "Olmo2Config",
        {"attention_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": True,
         "num_hidden_layers": 3},
    ),
    Tiny("olmo3", "Olmo3Config", {"num_hidden_layers": 5, "sliding_window": 9}),
    Tiny(
        "olmo3-yarn", "Olmo3Config",
        {
            "num_hidden_layers": 4, "sliding_window": 6, "num_key_value_heads": 1,
            "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default"}},
        },
        edit=as_published,
    ),
    Tiny(
        "olmo3-two-ropes", "Olmo3Config",
        {
            "num_hidden_layers": 3, "sliding_window": 12, "layer_types": [FULL, SLIDING, FULL],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0},
                SLIDING: YARN,
            },
        },
    ),
]  # fmt: skip
