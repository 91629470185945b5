"""Gemma-2: norms before and behind each layer, soft caps, and a window in every second layer."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum, total
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.norms import NormKind
from kiln.engine.models.windows import FULL, SLIDING, layer_kinds, sliding_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias = fields.flag("attention_bias")
    kinds = layer_kinds(fields, lambda layer: FULL if layer % 2 else SLIDING, SLIDING, FULL)
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        windows=sliding_windows(fields, kinds),
        norm=NormKind.RMS_ZERO_CENTRED,
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
        soft_cap=fields.optional_number("attn_logit_softcapping") or 0.0,
        embedding_scale=fields.count("hidden_size") ** 0.5,
        rounds_embedding_scale=True,
        logit_soft_cap=fields.optional_number("final_logit_softcapping") or 0.0,
        overflows_float16=True,
    )


class Block:
    """Attention and a feed-forward layer, each between two norms."""

    def __init__(self, build: LayerBuilder) -> None:
        self.attention = build.attention()
        self.attention_norm = build.norm_before(self.attention, "input_layernorm")
        self.attended_norm = build.norm("post_attention_layernorm")
        self.mlp = build.mlp()
        self.mlp_norm = build.norm_before(self.mlp, "pre_feedforward_layernorm")
        self.fed_norm = build.norm("post_feedforward_layernorm")

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Run the layer; see models/block.py."""
        x = self.attention(positions, self.attention_norm(x, residual))
        x = self.attended_norm(total(x))
        x = self.mlp(self.mlp_norm(x, residual))
        return self.fed_norm(total(x))


FAMILY = Family(
    architectures=("Gemma2ForCausalLM",),
    traits=traits,
    block=Block,
    model_type="gemma2",
    names={"hidden_act": "hidden_activation"},
    ignored=("hidden_act", "cache_implementation"),
    keys={
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
