"""Ernie-4.5 with experts, which a softmax with a choice bias selects beside shared ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.layers.router import Routing
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.experts import ExpertNames, Experts, read_experts
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits

_NAMES = ExpertNames(
    shared="shared_experts",
    choice_bias="moe_statics.e_score_correction_bias",
    raw_choice_bias="gate.moe_statics.e_score_correction_bias",
)


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    if fields.flag("use_bias"):
        raise fields.error("use_bias", "but Kiln has no bias of the LM head: want false")
    return Traits(interleaved=True, experts=_experts(fields))


def _experts(fields: Fields) -> Experts:
    first, step = fields.count("moe_layer_start_index", least=0), fields.count("moe_layer_interval")
    last = fields.count("moe_layer_end_index", least=-1)
    layers = range(fields.count("num_hidden_layers"))
    last = len(layers) - 1 if last == -1 else last
    size = fields.count("moe_intermediate_size")
    read = read_experts(
        fields,
        "moe_num_experts",
        "moe_intermediate_size",
        layers=tuple((one + 1) % step == 0 and first <= one <= last for one in layers),
        shared_size=size * fields.count("moe_num_shared_experts", least=0),
        names=_NAMES,
    )
    return replace(
        read,
        routing=Routing(read.top_k, least_sum=fields.number("moe_norm_min")),
        router_in_float32=True,
        choice_bias=(1, read.num_experts),
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
    architectures=("Ernie4_5_MoeForCausalLM",),
    traits=traits,
    block=Block,
    model_type="ernie4_5_moe",
    names={"num_experts_per_tok": "moe_k"},
    unused=r".*mtp.*",  # layers that predict more tokens at once
    ignored=("moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers"),
    keys={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 1536,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
)
