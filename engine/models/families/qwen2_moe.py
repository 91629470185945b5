"""Qwen1.5 and Qwen2 with experts, and one more behind a gate that every token goes through."""

from __future__ import annotations

from kiln.engine.models.experts import read_experts, sparse_layers
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.windows import switched_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    return Traits(
        qkv_bias=fields.flag("qkv_bias", True),
        windows=switched_windows(fields),
        experts=read_experts(
            fields,
            "num_experts",
            "moe_intermediate_size",
            layers=sparse_layers(fields),
            renormalise=fields.flag("norm_topk_prob", False),
            shared_size=fields.count("shared_expert_intermediate_size"),
        ),
    )


FAMILY = Family(architectures=("Qwen2MoeForCausalLM",), traits=traits)
