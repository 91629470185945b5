"""GLM-4 of 2024 and GLM-edge: half of each head rotated in pairs."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits, read_head_dim
from kiln.engine.models.rope_config import read_rope


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    rope = read_rope(fields, read_head_dim(fields), partial=0.5)
    return Traits(qkv_bias=fields.flag("attention_bias"), rope=rope, interleaved=True)


class Block:
    """Attention and a feed-forward layer, each behind a norm of the residual stream."""

    def __init__(self, build: LayerBuilder) -> None:
        self.attention = build.attention()
        self.attention_norm = build.norm_before(self.attention, "input_layernorm")
        self.mlp = build.mlp(fused="gate_up_proj")
        self.mlp_norm = build.norm_before(self.mlp, "post_attention_layernorm")

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Run the layer; see models/block.py."""
        x = self.attention(positions, self.attention_norm(x, residual))
        return self.mlp(self.mlp_norm(x, residual))


FAMILY = Family(
    architectures=("GlmForCausalLM",),
    traits=traits,
    block=Block,
    model_type="glm",
    keys={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
    },
)
