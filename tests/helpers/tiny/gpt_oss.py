"""gpt-oss: windows at either parity, YaRN by default or as files have it, biases or none."""

from __future__ import annotations

from typing import Any

from tiny.model import ATTENTION, Tiny

SIZES = {
    "hidden_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "head_dim": 20,
    "intermediate_size": 44,
    "sliding_window": 7,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}


def published(content: dict[str, Any]) -> None:
    """Write what files of 2025 have."""
    content["rope_scaling"] = content.pop("rope_parameters")
    content["rope_theta"] = content["rope_scaling"].pop("rope_theta")
    content.update(experts_per_token=2, initial_context_length=16, output_router_logits=False)


def sparse(content: dict[str, Any]) -> None:
    """Leave out what may be left out."""
    for name in ("rope_parameters", "layer_types", "attention_bias", "swiglu_alpha"):
        content.pop(name, None)
    for name in ("num_key_value_heads", "rms_norm_eps", "swiglu_limit", "hidden_act"):
        content.pop(name, None)


def model(name: str, edit: Any = lambda content: None, **fields: Any) -> Tiny:
    """Return a variant."""
    return Tiny(name, "GptOssConfig", {**SIZES, **fields}, edit, targets=ATTENTION)


SHORT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
MODELS = [
    model("gpt-oss", sparse, num_attention_heads=8, num_key_value_heads=8),
    model(
        "gpt-oss-published", published, rope_parameters=SHORT_YARN, swiglu_limit=0.9,
        swiglu_alpha=1.3,
    ),
    model(
        "gpt-oss-without-biases", attention_bias=False, tie_word_embeddings=True,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
]  # fmt: skip
