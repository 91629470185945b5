"""MiniMax-M2: norms over all queries and all keys, and experts by sigmoid scores and a bias."""

from __future__ import annotations

from dataclasses import replace

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.layers.router import Routing
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.experts import ExpertNames, Experts, read_experts
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import QKNorm, Traits, read_head_dim
from kiln.engine.models.rope_config import read_rope

_NAMES = ExpertNames(
    layer="block_sparse_moe.",
    gate="w1",
    up="w3",
    down="w2",
    choice_bias="e_score_correction_bias",
)


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    head_dim = read_head_dim(fields)
    rotated = fields.count("rotary_dim", head_dim)
    if rotated % 2 or rotated > head_dim:
        raise fields.error("rotary_dim", f"want an even number of the {head_dim} of a head")
    return Traits(
        qk_norm=QKNorm.PROJECTION,
        rope=read_rope(fields, head_dim, partial=rotated / head_dim),
        experts=_experts(fields),
    )


def _experts(fields: Fields) -> Experts:
    read = read_experts(fields, "num_local_experts", "intermediate_size", names=_NAMES)
    routing = Routing(read.top_k, scoring="sigmoid")
    return replace(read, routing=routing, choice_bias=(read.num_experts,))


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
    architectures=("MiniMaxM2ForCausalLM",),
    traits=traits,
    block=Block,
    model_type="minimax_m2",
    unused=r"model\.layers\.(?P<layer>\d+)\..*|model\.mtp.*",
    ignored=(
        *("use_qk_norm", "qk_norm_type", "scoring_func", "use_routing_bias", "attn_type_list"),
        *("use_mtp", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode"),
        *("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
    ),
    keys={
        "max_position_embeddings": 196_608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5e6,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rotary_dim": None,
    },
)
