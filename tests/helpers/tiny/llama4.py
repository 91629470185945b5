"""Llama-4: chunks, layers without rotation, dense layers between; alone and with images."""

from __future__ import annotations

from typing import Any

from tiny.model import ATTENTION, DENSE, Tiny

SIZES = {
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "hidden_size": 72,
    "head_dim": 20,
    "intermediate_size": 28,
    "intermediate_size_mlp": 44,
    "num_local_experts": 5,
    "attention_chunk_size": 7,
    "floor_scale": 6,
}
LLAMA3 = {  # with equal factors, as in the files of Scout
    "rope_type": "llama3", "rope_theta": 700.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 1.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16,
    "projector_output_dim": 16,
}  # fmt: skip


def wrapped(config: Any) -> Any:
    """Return a model of texts and images around a text config."""
    import transformers

    whole = transformers.Llama4Config(text_config=config.to_dict(), vision_config=VISION)
    return transformers.Llama4ForConditionalGeneration(whole)


def published(content: dict[str, Any]) -> None:
    """Write what files of 2025 have."""
    text = content["text_config"]
    rope = text.pop("rope_parameters")
    text.update(
        rope_theta=rope.pop("rope_theta"), rope_scaling=rope, attn_temperature_tuning=4,
        no_rope_layers=[], cache_implementation="hybrid",
    )  # fmt: skip
    del text["layer_types"], text["moe_layers"]


MODELS = [
    Tiny(
        "llama4", "Llama4TextConfig", {**SIZES, "interleave_moe_layer_step": 2}, targets=DENSE
    ),
    Tiny(
        "llama4-without-norms", "Llama4TextConfig",
        {
            **SIZES, "use_qk_norm": False, "attn_temperature_tuning": False, "moe_layers": [0, 3],
            "no_rope_layers": [0, 1, 1, 0], "attention_bias": True, "num_experts_per_tok": 2,
            "rope_parameters": LLAMA3, "tie_word_embeddings": True,
        },
        targets=ATTENTION,
    ),
    Tiny(
        "llama4-wrapped", "Llama4TextConfig", {**SIZES, "rope_parameters": YARN}, published,
        targets=ATTENTION, make=wrapped,
    ),
]  # fmt: skip
