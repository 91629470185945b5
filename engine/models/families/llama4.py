"""Llama-4, also the texts of the models with images: chunks of attention, and plain layers between.

Most layers rotate, and attend to the tokens of their own chunk. The others do neither; there
queries grow with their position. The weights of the experts multiply what these get.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.layers.query_scale import QueryScaling
from kiln.engine.layers.router import Routing
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.experts import ExpertNames, Experts, Layout, read_experts
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import QKNorm, Traits, read_head_dim
from kiln.engine.models.rope_config import RopeConfig, read_rope
from kiln.engine.models.windows import CHUNKED, FULL, chunks, layer_kinds, rotating_layers

_NAMES = ExpertNames(layer="feed_forward.", router="router", layout=Layout(in_out=True))


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias, rotates = fields.flag("attention_bias"), rotating_layers(fields)
    kinds = layer_kinds(fields, lambda layer: CHUNKED if rotates[layer] else FULL, CHUNKED, FULL)
    normed = fields.flag("use_qk_norm")
    rope, scaling = _rope(fields, normed), _query_scaling(fields)
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QKNorm.HEAD_WITHOUT_WEIGHT if normed else QKNorm.NONE,
        windows=chunks(fields, kinds),
        rope=rope,
        ropes=tuple(rope if one else None for one in rotates),
        interleaved=True,
        query_scalings=tuple(None if one else scaling for one in rotates),
        experts=_experts(fields),
    )


def _rope(fields: Fields, normed: bool) -> RopeConfig:
    """Read the rotary embedding; a norm behind it, as in transformers, takes its factor away."""
    rope = read_rope(fields, read_head_dim(fields))
    if not normed or rope.scaling is None or rope.scaling.kind != "yarn":
        return rope
    return replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))


def _query_scaling(fields: Fields) -> QueryScaling | None:
    """Read how queries grow; the switch is a number in some files."""
    if not fields.value("attn_temperature_tuning"):
        return None
    beta, period = fields.number("attn_scale"), fields.count("floor_scale")
    return QueryScaling(beta, period, shift=1, rounds=False)


def _experts(fields: Fields) -> Experts:
    layers, listed = range(fields.count("num_hidden_layers")), fields.counts("moe_layers")
    if "moe_layers" not in fields:
        step = fields.count("interleave_moe_layer_step")
        listed = [*layers[step - 1 :: step]]
    read = read_experts(
        fields,
        "num_local_experts",
        "expert_size",
        layers=tuple(layer in listed for layer in layers),
        shared_size=fields.count("expert_size"),
        names=_NAMES,
    )
    routing = Routing(read.top_k, scoring="sigmoid", renormalise=False)
    return replace(read, routing=routing, weighs_inputs=True, shared_gate=False)


class Block:
    """Attention and a feed-forward layer, each behind a norm of the residual stream."""

    def __init__(self, build: LayerBuilder) -> None:
        self.attention = build.attention()
        self.attention_norm = build.norm_before(self.attention, "input_layernorm")
        self.mlp = build.feed_forward("feed_forward")
        self.mlp_norm = build.norm_before(self.mlp, "post_attention_layernorm")

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Run the layer; see models/block.py."""
        x = self.attention(positions, self.attention_norm(x, residual))
        return self.mlp(self.mlp_norm(x, residual))


FAMILY = Family(
    architectures=("Llama4ForCausalLM",),
    traits=traits,
    block=Block,
    model_type="llama4_text",
    wrappers=("Llama4ForConditionalGeneration",),
    image_tokens={
        "image_token_index": 200_092,
        "boi_token_index": 200_080,
        "eoi_token_index": 200_081,
    },
    ignored=("cache_implementation",),
    names={"intermediate_size": "intermediate_size_mlp", "expert_size": "intermediate_size"},
    keys={
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "attention_bias": False,
        "use_qk_norm": True,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
    },
)
