"""Cohere-2 (Command R7B, Command A): attention and feed-forward layer side by side on one norm.

Three layers with a window, whose heads are rotated in pairs, precede each with full attention,
which has no positions.
"""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum, plus
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits, read_head_dim
from kiln.engine.models.norms import NormKind
from kiln.engine.models.rope_config import read_rope
from kiln.engine.models.windows import FULL, SLIDING, layer_kinds, sliding_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias, every = fields.flag("attention_bias"), fields.count("sliding_window_pattern")
    kinds = layer_kinds(
        fields, lambda layer: SLIDING if (layer + 1) % every else FULL, SLIDING, FULL
    )
    head_dim = fields.count("hidden_size") // fields.count("num_attention_heads")
    if read_head_dim(fields) != head_dim:
        raise fields.error("head_dim", f"want hidden_size / num_attention_heads, {head_dim}")
    rope, windows = read_rope(fields, head_dim), sliding_windows(fields, kinds)
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        windows=windows,
        rope=rope,
        ropes=tuple(None if window is None else rope for window in windows),
        interleaved=True,
        norm=NormKind.LAYER,
        logit_scale=fields.number("logit_scale"),
    )


class Block:
    """Attention beside a feed-forward layer, both behind one norm of the residual stream."""

    def __init__(self, build: LayerBuilder) -> None:
        self.norm = build.stream_norm("input_layernorm")
        self.attention = build.attention()
        self.mlp = build.mlp()

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Run the layer; see models/block.py."""
        x = self.norm(x, residual)
        return plus(self.attention(positions, x), self.mlp(x))


FAMILY = Family(
    architectures=("Cohere2ForCausalLM",),
    traits=traits,
    block=Block,
    model_type="cohere2",
    names={"rms_norm_eps": "layer_norm_eps"},
    ignored=(
        *("order_of_interleaved_layers", "rotary_pct", "position_embedding_type", "layer_switch"),
        *("use_embedding_sharing", "use_gated_activation", "use_parallel_block"),
        *("use_parallel_embedding", "cache_implementation"),
    ),
    keys={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
)
