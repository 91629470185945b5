"""Seed-OSS: Llama with biases on query, key and value, and heads wider than usual."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    return Traits(
        qkv_bias=fields.flag("attention_bias"),
        output_bias=fields.flag("attention_out_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


class Block:
    """Attention and a feed-forward layer, each behind a norm of the residual stream."""

    def __init__(self, build: LayerBuilder) -> None:
        self.attention = build.attention()
        self.attention_norm = build.norm_before(self.attention, "input_layernorm")
        self.mlp = build.mlp()
        self.mlp_norm = build.norm_before(self.mlp, "post_attention_layernorm")

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Run the layer; see models/block.py."""
        x = self.attention(positions, self.attention_norm(x, residual))
        return self.mlp(self.mlp_norm(x, residual))


FAMILY = Family(
    architectures=("SeedOssForCausalLM",),
    traits=traits,
    block=Block,
    model_type="seed_oss",
    keys={
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
)
