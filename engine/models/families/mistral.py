"""Mistral: no biases, and one sliding window for all layers if config.json has one."""

from __future__ import annotations

from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.windows import constant_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    return Traits(windows=constant_windows(fields))


FAMILY = Family(
    architectures=("MistralForCausalLM",),
    traits=traits,
    model_type="mistral",
    keys={
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "num_key_value_heads": 8,
    },
)
