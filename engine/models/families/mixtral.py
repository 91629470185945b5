"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from kiln.engine.models.experts import ExpertNames, read_experts
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.windows import constant_windows

_NAMES = ExpertNames("block_sparse_moe.", gate="w1", up="w3", down="w2")


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    return Traits(
        windows=constant_windows(fields),
        experts=read_experts(fields, "num_local_experts", "intermediate_size", names=_NAMES),
    )


FAMILY = Family(
    architectures=("MixtralForCausalLM",),
    traits=traits,
    model_type="mixtral",
    keys={
        "max_position_embeddings": 131072,
        "sliding_window": None,
        "num_local_experts": None,
        "num_experts_per_tok": None,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
)
