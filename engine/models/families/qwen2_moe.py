"""Qwen1.5 and Qwen2 with experts, and a gated shared expert."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.experts import read_experts, sparse_layers
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.windows import switched_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    return Traits(
        qkv_bias=fields.flag("qkv_bias"),
        # The comparison is reversed from Qwen2, and only every second layer has a window.
        windows=switched_windows(fields, lambda layer, end: layer < end and layer % 2 == 0),
        experts=read_experts(
            fields,
            "num_experts",
            "moe_intermediate_size",
            layers=sparse_layers(fields),
            renormalise=fields.flag("norm_topk_prob"),
            shared_size=fields.count("shared_expert_intermediate_size"),
        ),
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
    architectures=("Qwen2MoeForCausalLM",),
    traits=traits,
    block=Block,
    model_type="qwen2_moe",
    keys={
        "max_position_embeddings": 32768,
        "qkv_bias": True,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_experts": None,
        "num_experts_per_tok": None,
        "moe_intermediate_size": None,
        "shared_expert_intermediate_size": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
        "num_key_value_heads": 16,
    },
)
