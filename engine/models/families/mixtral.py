"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.models.build_layer import LayerBuilder
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


class Block:
    """Attention and a feed-forward layer, each behind a norm of the residual stream."""

    def __init__(self, build: LayerBuilder) -> None:
        self.attention = build.attention()
        self.attention_norm = build.norm_before(self.attention, "input_layernorm")
        self.mlp = build.feed_forward()
        self.mlp_norm = build.norm_before(self.mlp, "post_attention_layernorm")

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Run the layer; see models/block.py."""
        x = self.attention(positions, self.attention_norm(x, residual))
        return self.mlp(self.mlp_norm(x, residual))


FAMILY = Family(
    architectures=("MixtralForCausalLM",),
    traits=traits,
    block=Block,
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
