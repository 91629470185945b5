"""Qwen3, dense: norms on query and key; sliding windows only if enabled."""

from __future__ import annotations

from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.windows import switched_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias = fields.flag("attention_bias")
    windows = switched_windows(fields, lambda layer, at: layer >= at)
    return Traits(qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows)


FAMILY = Family(
    architectures=("Qwen3ForCausalLM",),
    traits=traits,
    model_type="qwen3",
    keys={
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_qk_norm": None,  # transformers ignores it: Qwen3 always has the norms
    },
)
