"""GLM-4.5, 4.6 and 4.7: dense layers first, then experts chosen by sigmoid scores and a bias."""

from __future__ import annotations

from dataclasses import replace

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.layers.router import Routing
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.experts import ExpertNames, Experts, read_experts, read_groups
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import QKNorm, Traits, read_head_dim
from kiln.engine.models.rope_config import read_rope


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    return Traits(
        qkv_bias=fields.flag("attention_bias"),
        qk_norm=QKNorm.HEAD if fields.flag("use_qk_norm") else QKNorm.NONE,
        rope=read_rope(fields, read_head_dim(fields), partial=0.5),
        experts=_experts(fields),
    )


def _experts(fields: Fields) -> Experts:
    dense = fields.count("first_k_dense_replace", least=0)
    size, shared = fields.count("moe_intermediate_size"), fields.count("n_shared_experts")
    read = read_experts(
        fields,
        "n_routed_experts",
        "moe_intermediate_size",
        layers=tuple(layer >= dense for layer in range(fields.count("num_hidden_layers"))),
        shared_size=size * shared,
        names=ExpertNames(shared="shared_experts"),
    )
    routing = Routing(
        read.top_k,
        scoring="sigmoid",
        groups=read_groups(fields, read),
        renormalise=fields.flag("norm_topk_prob"),
        factor=fields.number("routed_scaling_factor"),
    )
    return replace(
        read,
        routing=routing,
        router_in_float32=True,
        choice_bias=(read.num_experts,),
        shared_gate=False,
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
    architectures=("Glm4MoeForCausalLM",),
    traits=traits,
    block=Block,
    model_type="glm4_moe",
    # Layers behind the last predict more tokens at once, which transformers leaves out too.
    unused=r"model\.layers\.(?P<layer>\d+)\..*",
    ignored=("num_nextn_predict_layers", "num_mtp_layers"),
    keys={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
)
