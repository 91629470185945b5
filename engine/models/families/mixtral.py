"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from kiln.engine.models.experts import ExpertNames, read_experts
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits

_NAMES = ExpertNames("block_sparse_moe.", gate="w1", up="w3", down="w2")


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    window = fields.optional_count("sliding_window")
    return Traits(
        windows=(window,) * fields.count("num_hidden_layers"),
        experts=read_experts(fields, "num_local_experts", "intermediate_size", names=_NAMES),
    )


FAMILY = Family(architectures=("MixtralForCausalLM",), traits=traits)
