"""Ministral of 2024: Mistral, whose layers may differ in having a window."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.windows import FULL, SLIDING, layer_kinds, sliding_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    default = SLIDING if "sliding_window" in fields else FULL
    kinds = layer_kinds(fields, lambda _: default, SLIDING, FULL)
    return Traits(windows=sliding_windows(fields, kinds))


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
    architectures=("MinistralForCausalLM",),
    traits=traits,
    block=Block,
    model_type="ministral",
    keys={
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "num_key_value_heads": 8,
    },
)
