"""Gemma-2, Gemma-3, and the texts of Gemma-3 with images."""

from __future__ import annotations

from functools import partial
from typing import Any

from tiny.model import Tiny

_SIZES = {"head_dim": 24, "num_hidden_layers": 3, "sliding_window": 9}
_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e3},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}


def _older(content: dict[str, Any]) -> None:
    """Write what files of transformers 4 have, such as Gemma-3-1B's."""
    full, local = (content["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    del content["rope_parameters"], content["layer_types"]
    content.update(
        rope_theta=full.pop("rope_theta"),
        rope_scaling=full,
        rope_local_base_freq=local["rope_theta"],
        cache_implementation="hybrid",
        hidden_act="silu",  # which neither reads
    )


def _published(content: dict[str, Any]) -> None:
    """Leave out what files of the model with images leave out, as its default."""
    text = content["text_config"]
    _older(text)
    for name in (
        *("num_attention_heads", "num_key_value_heads", "head_dim", "query_pre_attn_scalar"),
        *("rms_norm_eps", "hidden_activation", "attention_bias", "tie_word_embeddings"),
    ):
        del text[name]
    del content["tie_word_embeddings"]


def _dtype_inside(content: dict[str, Any]) -> None:
    """Tell the dtype of the text model alone."""
    content["text_config"]["dtype"] = content.pop("dtype")


def _with_images(text: Any, tied: bool = True) -> Any:
    """Return a model of texts and images around a text config."""
    import transformers

    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 16,
    }  # fmt: skip
    whole = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(whole)


def _with_new_names(text: Any) -> Any:
    """Return such a model whose files have the names of transformers 5, and a head of its own."""
    model = _with_images(text, tied=False)
    model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
    return model


MODELS = [
    # A small scale and small caps, so that they matter.
    Tiny(
        "gemma2",
        "Gemma2Config",
        {**_SIZES, "head_dim": 80, "query_pre_attn_scalar": 11, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 3.0},
    ),
    Tiny(
        "gemma2-no-caps-biases-untied",
        "Gemma2Config",
        {**_SIZES, "attn_logit_softcapping": None, "final_logit_softcapping": None,
         "attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
         "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e3}},
    ),
    Tiny(
        "gemma3",
        "Gemma3TextConfig",
        {**_SIZES, "query_pre_attn_scalar": 11, "rope_parameters": _ROPES,
         "sliding_window_pattern": 2, "final_logit_softcapping": 3.0,
         "attn_logit_softcapping": 2.0},
    ),
    Tiny(
        "gemma3-older",
        "Gemma3TextConfig",
        {**_SIZES, "rope_parameters": _ROPES, "num_hidden_layers": 7, "num_attention_heads": 2,
         "attention_bias": True, "tie_word_embeddings": False},
        edit=_older,
    ),
    Tiny(
        "gemma3-with-images",
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "sliding_window": 9, "rope_parameters": _ROPES,
         "num_attention_heads": 8, "num_key_value_heads": 4, "final_logit_softcapping": 3.0},
        edit=_published,
        make=_with_images,
    ),
    Tiny(
        "gemma3-with-images-new-names",
        "Gemma3TextConfig",
        {**_SIZES, "rope_parameters": _ROPES, "sliding_window_pattern": 2},
        edit=_dtype_inside,
        make=_with_new_names,
    ),
]  # fmt: skip
