"""Qwen3 with experts: norms on query and key; normalized expert weights if configured."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.experts import read_experts, sparse_layers
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import QKNorm, Traits
from kiln.engine.models.windows import constant_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias = fields.flag("attention_bias")
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QKNorm.HEAD,
        # transformers reads neither max_window_layers nor layer_types here.
        windows=constant_windows(fields) if fields.flag("use_sliding_window") else (),
        experts=read_experts(
            fields,
            # transformers 5 reads either name, and writes the second.
            "num_experts" if "num_experts" in fields else "num_local_experts",
            "moe_intermediate_size",
            layers=sparse_layers(fields),
            renormalise=fields.flag("norm_topk_prob"),
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
    architectures=("Qwen3MoeForCausalLM",),
    traits=traits,
    block=Block,
    model_type="qwen3_moe",
    ignored=("use_qk_norm",),  # Qwen3 always has the norms
    keys={
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": None,
        "num_experts": None,
        "num_local_experts": None,
        "num_experts_per_tok": None,
        "moe_intermediate_size": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
        "num_key_value_heads": 4,
    },
)
