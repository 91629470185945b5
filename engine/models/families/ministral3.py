"""Ministral-3 and Devstral-2: Mistral whose queries grow with their position, stretched by YaRN."""

from __future__ import annotations

import torch

from kiln.engine.layers.partial_sum import Sum
from kiln.engine.layers.query_scale import QueryScaling
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits, read_head_dim
from kiln.engine.models.rope_config import RopeConfig, read_rope
from kiln.engine.models.windows import constant_windows

_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
_OWN = (_BETA, "max_position_embeddings")  # transformers reads the second nowhere
_YARN = {  # transformers' rope_parameters for a config without any
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    _ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    rope, scaling = _positions(fields)
    return Traits(
        windows=constant_windows(fields),
        rope=rope,
        query_scalings=(scaling,) * fields.count("num_hidden_layers"),
    )


def _positions(fields: Fields) -> tuple[RopeConfig, QueryScaling | None]:
    """Read the rotary embedding, and how queries grow: by its original length."""
    name = "rope_scaling" if fields.group("rope_scaling") else "rope_parameters"
    values = fields.value(name) if name in fields else _YARN
    group = fields.standing_for(name, values)
    known = {key: value for key, value in values.items() if key not in _OWN}
    rope = read_rope(fields.replaced(name, known), read_head_dim(fields))
    if _BETA not in group:
        return rope, None
    original = 0 if rope.scaling is None else rope.scaling.original_max_position_embeddings
    return rope, QueryScaling(group.number(_BETA), original or group.count(_ORIGINAL))


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
    architectures=("Ministral3ForCausalLM",),
    traits=traits,
    block=Block,
    model_type="ministral3",
    wrappers=("Mistral3ForConditionalGeneration",),
    image_tokens={"image_token_index": 10},
    keys={
        "max_position_embeddings": 262144,
        "sliding_window": None,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    },
)
