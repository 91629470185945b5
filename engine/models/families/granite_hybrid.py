"""Granite-4 without experts and state layers: Granite-3, some of it without rotary embedding."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum, scaled
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits, read_head_dim
from kiln.engine.models.rope_config import read_rope
from kiln.engine.models.windows import FULL, layer_kinds


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    if fields.count("num_local_experts", least=0):
        raise fields.error("num_local_experts", "Kiln serves this family without experts: want 0")
    kinds = layer_kinds(fields, lambda _: "linear_attention", FULL)
    position = fields.text("position_embedding_type", "nope")
    if position not in ("nope", "rope"):
        raise fields.error("position_embedding_type", "want nope or rope")
    bias, rope = fields.flag("attention_bias"), read_rope(fields, read_head_dim(fields))
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        scale=fields.number("attention_multiplier"),
        rope=rope,
        ropes=(rope if position == "rope" else None,) * len(kinds),
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
        self.mlp = build.mlp("shared_mlp", fused="input_linear", down="output_linear")
        self.mlp_norm = build.norm_before(self.mlp, "post_attention_layernorm")

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Run the layer; see models/block.py."""
        x = scaled(self.attention(positions, self.attention_norm(x, residual)), self.scale)
        return scaled(self.mlp(self.mlp_norm(x, residual)), self.scale)


FAMILY = Family(
    architectures=("GraniteMoeHybridForCausalLM",),
    traits=traits,
    block=Block,
    model_type="granitemoehybrid",
    names={"intermediate_size": "shared_intermediate_size"},
    # Of experts, state layers and training, and the size of what this family calls otherwise.
    ignored=(
        *("num_experts_per_tok", "mamba_n_heads", "mamba_n_groups", "mamba_d_state"),
        *("mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_chunk_size", "mamba_conv_bias"),
        *("mamba_proj_bias", "time_step_limit", "normalization_function", "init_method"),
    ),
    keys={
        "max_position_embeddings": 2048,
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "position_embedding_type": None,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
)
