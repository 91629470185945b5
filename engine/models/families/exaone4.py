"""EXAONE-4: norms behind each layer; with windows, layers of full attention do not rotate."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum, total
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import QKNorm, Traits, read_head_dim
from kiln.engine.models.rope_config import read_rope
from kiln.engine.models.windows import FULL, SLIDING, layer_kinds, sliding_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    rope = read_rope(fields, read_head_dim(fields))
    kinds = layer_kinds(fields, lambda layer: _kind(fields, layer), SLIDING, FULL)
    windows = sliding_windows(fields, kinds)
    everywhere = "sliding_window" not in fields
    return Traits(
        qk_norm=QKNorm.HEAD,
        windows=windows,
        ropes=tuple(rope if everywhere or window is not None else None for window in windows),
    )


def _kind(fields: Fields, layer: int) -> str:
    """Return the kind of a layer's attention where config.json has no ``layer_types``.

    A text such as LLLG repeats itself, L for a layer with a window; the last layer has none.
    """
    pattern = fields.value("sliding_window_pattern")
    if "sliding_window" not in fields:
        return FULL
    if not isinstance(pattern, str):
        return SLIDING if (layer + 1) % fields.count("sliding_window_pattern") else FULL
    if not pattern or not {*pattern} <= {*"LG"}:
        raise fields.error("sliding_window_pattern", "want a number, or letters L and G")
    last = layer + 1 == fields.count("num_hidden_layers")
    return SLIDING if pattern[layer % len(pattern)] == "L" and not last else FULL


class Block:
    """Attention and a feed-forward layer, each before a norm of what it adds.

    Both read the residual stream itself, which therefore is summed up before each.
    """

    def __init__(self, build: LayerBuilder) -> None:
        self.attention = build.attention()
        self.attended_norm = build.norm("post_attention_layernorm")
        self.mlp = build.mlp()
        self.fed_norm = build.norm("post_feedforward_layernorm")

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        """Run the layer; see models/block.py."""
        residual += total(x)
        x = self.attended_norm(total(self.attention(positions, residual)))
        residual += x
        return self.fed_norm(total(self.mlp(residual)))


FAMILY = Family(
    architectures=("Exaone4ForCausalLM",),
    traits=traits,
    block=Block,
    model_type="exaone4",
    keys={
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
    },
)
