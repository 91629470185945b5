"""OLMo-3: OLMo-2 with windows; only layers of full attention have a scaled rope."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum, total
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import QKNorm, Traits, read_head_dim
from kiln.engine.models.norms import NormKind
from kiln.engine.models.rope_config import ropes_by_kind
from kiln.engine.models.windows import FULL, SLIDING, layer_kinds, sliding_windows

_THETA = 5e5


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias = fields.flag("attention_bias")
    kinds = layer_kinds(fields, lambda layer: SLIDING if (layer + 1) % 4 else FULL, SLIDING, FULL)
    # transformers gives the theta at the top of older files to layers of full attention alone.
    fields = fields.replaced("sliding_theta", _THETA)
    thetas = {FULL: "rope_theta", SLIDING: "sliding_theta"}
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QKNorm.PROJECTION,
        windows=sliding_windows(fields, kinds),
        ropes=ropes_by_kind(fields, read_head_dim(fields), kinds, thetas),
        norm=NormKind.RMS_ROUND_ONCE,
    )


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
    architectures=("Olmo3ForCausalLM",),
    traits=traits,
    block=Block,
    model_type="olmo3",
    keys={
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": _THETA,
    },
)
