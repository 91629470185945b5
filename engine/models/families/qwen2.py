"""Qwen2 and Qwen2.5: biases on query, key and value; sliding windows only if enabled."""

from __future__ import annotations

from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.windows import switched_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    return Traits(qkv_bias=True, windows=switched_windows(fields, lambda layer, at: layer >= at))


FAMILY = Family(
    architectures=("Qwen2ForCausalLM",),
    traits=traits,
    model_type="qwen2",
    keys={
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
    },
)
