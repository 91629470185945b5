"""Mistral-Small-3 and Ministral-3, also as the text part of a model of texts and images."""

from __future__ import annotations

from typing import Any

from tiny.model import Tiny

VISION = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 8, "patch_size": 4, "image_size": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 16.0,
    "original_max_position_embeddings": 6,
}  # fmt: skip


def wrapped(config: Any) -> Any:
    """Return a model of texts and images around a text config, with a head of its own."""
    import transformers

    whole = transformers.Mistral3Config(
        text_config=config.to_dict(),
        vision_config=VISION,
        tie_word_embeddings=False,
        image_token_index=1,
    )
    return transformers.Mistral3ForConditionalGeneration(whole)


def as_published(content: dict[str, Any]) -> None:
    """Let config.json be silent about the head, as published files are: the default is tied."""
    del content["tie_word_embeddings"], content["text_config"]["tie_word_embeddings"]


def as_in_transformers_4(content: dict[str, Any]) -> None:
    """Give the rotary embedding the older keys."""
    rope = content.pop("rope_parameters")
    content["rope_theta"] = rope.pop("rope_theta")
    content["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}


MODELS = [
    Tiny(
        "mistral3",
        "MistralConfig",
        {"num_hidden_layers": 3, "head_dim": 24, "sliding_window": None},
        edit=as_published,
        make=wrapped,
    ),
    Tiny("ministral3", "Ministral3Config", {"num_hidden_layers": 2}),
    Tiny(
        "ministral3-scaled-queries",
        "Ministral3Config",
        {
            "head_dim": 20, "tie_word_embeddings": True, "sliding_window": 15,
            "rope_parameters": {
                **YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "max_position_embeddings": 24,
                "llama_4_scaling_beta": 0.6,
            },
        },
        edit=as_in_transformers_4,
    ),
    Tiny(
        "ministral3-wrapped",
        "Ministral3Config",
        {
            "num_hidden_layers": 3, "head_dim": 16,
            "rope_parameters": {**YARN, "beta_fast": 4.0, "llama_4_scaling_beta": 0.3},
        },
        edit=as_published,
        make=wrapped,
    ),
]  # fmt: skip
