"""Granite-3, dense: Llama with factors of its embeddings, attention, layers and logits."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum, scaled
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias = fields.flag("attention_bias")
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        scale=fields.number("attention_multiplier"),
        embedding_scale=fields.number("embedding_multiplier"),
        residual_scale=fields.number("residual_multiplier"),
        logit_scale=1 / fields.number("logits_scaling"),
    )


class Block:
    """Attention and a feed-forward layer behind norms, scaled before they are added."""

    def __init__(self, build: LayerBuilder) -> None:
        self.scale = build.traits.residual_scale
        self.attention = build.attention()
        self.attention_norm = build.norm_before(self.attention, "input_layernorm")
        self.mlp = build.mlp()
        self.mlp_norm = build.norm_before(self.mlp, "post_attention_layernorm")

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Run the layer; see models/block.py."""
        x = scaled(self.attention(positions, self.attention_norm(x, residual)), self.scale)
        return scaled(self.mlp(self.mlp_norm(x, residual)), self.scale)


FAMILY = Family(
    architectures=("GraniteForCausalLM",),
    traits=traits,
    block=Block,
    model_type="granite",
    keys={
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
)
