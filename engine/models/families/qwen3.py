"""Qwen3, dense: norms on query and key; windows only where switched on."""

from __future__ import annotations

from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.windows import switched_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias = fields.flag("attention_bias", False)
    windows = switched_windows(fields)
    return Traits(qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows)


FAMILY = Family(architectures=("Qwen3ForCausalLM",), traits=traits)
