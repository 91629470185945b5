"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections, one window for all layers, longrope."""

from __future__ import annotations

from types import MappingProxyType

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits, read_head_dim
from kiln.engine.models.rope_config import read_rope
from kiln.engine.models.windows import constant_windows

# Older files call longrope "su", and some "yarn".
_ROPE_TYPES = MappingProxyType(
    {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
)


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    rope = read_rope(fields, read_head_dim(fields), partial=1.0, kinds=_ROPE_TYPES)
    return Traits(windows=constant_windows(fields), rope=rope)


class Block:
    """Attention and a feed-forward layer, each behind a norm of the residual stream."""

    def __init__(self, build: LayerBuilder) -> None:
        self.attention = build.attention(fused="qkv_proj")
        self.attention_norm = build.norm_before(self.attention, "input_layernorm")
        self.mlp = build.mlp(fused="gate_up_proj")
        self.mlp_norm = build.norm_before(self.mlp, "post_attention_layernorm")

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Run the layer; see models/block.py."""
        x = self.attention(positions, self.attention_norm(x, residual))
        return self.mlp(self.mlp_norm(x, residual))


FAMILY = Family(
    architectures=("Phi3ForCausalLM",),
    traits=traits,
    block=Block,
    model_type="phi3",
    ignored=("full_attn_mod", "interpolate_factor"),  # of Phi-4-mini
    keys={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
    },
)
