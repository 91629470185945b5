"""gpt-oss: experts with biases, attention sinks, and a window in every second layer.

The released files store the experts in MXFP4 (see formats/mxfp4.py). Other files have bf16.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kiln.engine.layers.activation import CLAMPED, Activation
from kiln.engine.layers.partial_sum import Sum
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.experts import ExpertNames, Experts, Layout, read_experts
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits, read_head_dim
from kiln.engine.models.norms import NormKind
from kiln.engine.models.rope_config import read_rope
from kiln.engine.models.windows import FULL, SLIDING, layer_kinds, sliding_windows

_NAMES = ExpertNames(router="router", layout=Layout(in_out=True, alternating=True))
_YARN = {  # transformers' rope_parameters for a config without any
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias = fields.flag("attention_bias")
    kinds = layer_kinds(fields, lambda layer: FULL if layer % 2 else SLIDING, SLIDING, FULL)
    if "rope_parameters" not in fields and not fields.group("rope_scaling"):
        fields = fields.replaced("rope_parameters", _YARN)
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        windows=sliding_windows(fields, kinds),
        sinks=True,
        rope=read_rope(fields, read_head_dim(fields)),
        norm=NormKind.RMS_ROUND_ONCE,
        experts=_experts(fields),
    )


def _experts(fields: Fields) -> Experts:
    numbers = fields.number("swiglu_alpha"), fields.number("swiglu_limit")
    return replace(
        read_experts(fields, "num_local_experts", "intermediate_size", names=_NAMES),
        activation=Activation(CLAMPED, numbers),
        biases=True,
        router_bias=True,
    )


class Block:
    """Attention and experts, each behind a norm of the residual stream."""

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
    architectures=("GptOssForCausalLM",),
    traits=traits,
    block=Block,
    model_type="gpt_oss",
    ignored=("experts_per_token", "initial_context_length"),
    keys={
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
)
