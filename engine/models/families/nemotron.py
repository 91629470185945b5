"""Nemotron-4 and Minitron: layer norms with a bias, and a squared ReLU without a gate."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits, read_head_dim
from kiln.engine.models.norms import NormKind
from kiln.engine.models.rope_config import read_rope


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias = fields.flag("attention_bias")
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        gated=False,
        rope=read_rope(fields, read_head_dim(fields), partial=0.5),
        norm=NormKind.LAYER_ZERO_CENTRED,
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
    architectures=("NemotronForCausalLM",),
    traits=traits,
    block=Block,
    model_type="nemotron",
    names={"rms_norm_eps": "norm_eps"},
    ignored=("rope_percent",),  # transformers reads partial_rotary_factor alone
    keys={
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "hidden_act": "relu2",
        "attention_bias": False,
        "mlp_bias": False,
    },
)
