"""Gemma-3, also the texts of the models with images: as Gemma-2, with norms on query and key.

Five layers with a window precede each with full attention; the two kinds rotate differently.
"""

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


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias, every = fields.flag("attention_bias"), fields.count("sliding_window_pattern")
    kinds = layer_kinds(fields, lambda layer: SLIDING if (layer + 1) % every else FULL,
                        SLIDING, FULL)  # fmt: skip
    thetas = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QKNorm.HEAD,
        windows=sliding_windows(fields, kinds),
        ropes=ropes_by_kind(fields, read_head_dim(fields), kinds, thetas),
        norm=NormKind.RMS_ZERO_CENTRED,
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
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
    architectures=("Gemma3ForCausalLM",),
    traits=traits,
    block=Block,
    model_type="gemma3_text",
    wrappers=("Gemma3ForConditionalGeneration",),
    of_head=("final_logit_softcapping",),
    image_tokens={
        "image_token_index": 262_144,
        "boi_token_index": 255_999,
        "eoi_token_index": 256_000,
    },
    names={"hidden_act": "hidden_activation"},
    # transformers reads the soft cap of attention in Gemma-2 alone.
    ignored=("hidden_act", "cache_implementation", "attn_logit_softcapping"),
    keys={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": None,
    },
)
