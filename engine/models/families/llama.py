"""Llama 2 and 3: biases only if config.json says so."""

from __future__ import annotations

from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias = fields.flag("attention_bias")
    return Traits(qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


FAMILY = Family(
    architectures=("LlamaForCausalLM",),
    traits=traits,
    model_type="llama",
    keys={
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
    },
)
