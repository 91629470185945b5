"""SmolLM3: Llama, in which every fourth layer does not rotate queries and keys."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits, read_head_dim
from kiln.engine.models.rope_config import read_rope
from kiln.engine.models.windows import (
    FULL,
    SLIDING,
    Windows,
    layer_kinds,
    rotating_layers,
    sliding_windows,
)


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias, rotates = fields.flag("attention_bias"), rotating_layers(fields)
    rope = read_rope(fields, read_head_dim(fields))
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        windows=_windows(fields, rotates),
        ropes=tuple(rope if one else None for one in rotates),
    )


def _windows(fields: Fields, rotates: list[bool]) -> Windows:
    """Return the windows: where there are some, layers that do not rotate have one."""
    if not fields.flag("use_sliding_window"):
        return ()

    def kind(layer: int) -> str:
        return FULL if rotates[layer] or "sliding_window" not in fields else SLIDING

    return sliding_windows(fields, layer_kinds(fields, kind, SLIDING, FULL))


class Block:
    """Attention and a feed-forward layer, each behind a norm of the residual stream."""

    def __init__(self, build: LayerBuilder) -> None:
        self.attention = build.attention()
        self.attention_norm = build.norm_before(self.attention, "input_layernorm")
        self.mlp = build.mlp()
        self.mlp_norm = build.norm_before(self.mlp, "post_attention_layernorm")

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Run the layer; see models/block.py."""
        x = self.attention(positions, self.attention_norm(x, residual))
        return self.mlp(self.mlp_norm(x, residual))


FAMILY = Family(
    architectures=("SmolLM3ForCausalLM",),
    traits=traits,
    block=Block,
    model_type="smollm3",
    ignored=("max_window_layers",),
    keys={
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": False,
        "mlp_bias": False,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
)
