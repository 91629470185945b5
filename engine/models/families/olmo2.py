"""OLMo-2: norms behind each layer, and over all heads of query and key together."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum, total
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import QKNorm, Traits
from kiln.engine.models.norms import NormKind


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias = fields.flag("attention_bias")
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QKNorm.PROJECTION,
        norm=NormKind.RMS_ROUND_ONCE,
    )


class Block:
    """Attention and a feed-forward layer, each before a norm of what it adds.

    Both read the residual stream itself, which therefore is summed up before each.
    """

    def __init__(self, build: LayerBuilder) -> None:
        self.attention = build.attention()
        self.attended_norm = build.norm("post_attention_layernorm")
        self.mlp = build.mlp()
        self.fed_norm = build.norm("post_feedforward_layernorm")

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Run the layer; see models/block.py."""
        residual += total(x)
        x = self.attended_norm(total(self.attention(positions, residual)))
        residual += x
        return self.fed_norm(total(self.mlp(residual)))


FAMILY = Family(
    architectures=("Olmo2ForCausalLM",),
    traits=traits,
    block=Block,
    model_type="olmo2",
    keys={
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
    },
)
