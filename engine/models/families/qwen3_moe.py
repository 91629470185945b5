"""Qwen3 with experts: norms on query and key; the weights of experts add up to 1 where asked."""

from __future__ import annotations

from kiln.engine.models.experts import read_experts, sparse_layers
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.windows import switched_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias = fields.flag("attention_bias", False)
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=switched_windows(fields),
        experts=read_experts(
            fields,
            # transformers 5 reads either name, and writes the second.
            "num_experts" if "num_experts" in fields else "num_local_experts",
            "moe_intermediate_size",
            layers=sparse_layers(fields),
            renormalise=fields.flag("norm_topk_prob", False),
        ),
    )


FAMILY = Family(architectures=("Qwen3MoeForCausalLM",), traits=traits)
