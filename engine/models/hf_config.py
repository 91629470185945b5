"""config.json of a decoder as one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from kiln.engine.kv.shape import AttentionShape
from kiln.engine.layers.mlp import GATES, PLAIN
from kiln.engine.layers.query_scale import QueryScaling
from kiln.engine.models.experts import Experts
from kiln.engine.models.fields import Fields
from kiln.engine.models.norms import NormKind
from kiln.engine.models.quantization import UNQUANTIZED, Quantization
from kiln.engine.models.rope_config import RopeConfig, read_rope
from kiln.engine.models.windows import Windows, check_layer_types

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class QKNorm(Enum):
    """The norm of queries and keys, before they are rotated."""

    NONE = "none"
    HEAD = "over each head"
    HEAD_WITHOUT_WEIGHT = "the same without a weight, in layers that rotate"
    PROJECTION = "over all heads together"


@dataclass(frozen=True, slots=True)
class Traits:
    """The differences between decoder families, as far as config.json tells them.

    ``windows`` has one entry per layer: which keys a token attends to, or None for all; empty:
    every layer has full attention. ``ropes`` too: how the layer rotates, or None if it does not;
    empty: as HFConfig.rope says. ``query_scalings`` too: how queries grow with their position;
    empty: they do not.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True  # whether feed-forward layers have a gate
    qk_norm: QKNorm = QKNorm.NONE
    windows: Windows = ()
    scale: float | None = None  # of the attention logits; None: head_dim ** -0.5
    soft_cap: float = 0.0  # of attention; see AttentionLayer
    sinks: bool = False
    rope: RopeConfig | None = None  # None: as the keys say that all families share
    ropes: tuple[RopeConfig | None, ...] = ()
    interleaved: bool = False  # rotary pairs are neighbours in the checkpoint: see rotary_order
    query_scalings: tuple[QueryScaling | None, ...] = ()
    norm: NormKind = NormKind.RMS
    embedding_scale: float = 1.0  # the factor of the embeddings, of what a layer adds, of logits
    rounds_embedding_scale: bool = False  # to the dtype of the weights, before it multiplies
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0  # logits become cap * tanh(logit / cap); 0: they stay
    experts: Experts | None = None
    overflows_float16: bool = False  # the residual stream exceeds 65,504


@dataclass(frozen=True, slots=True)
class HFConfig:
    """A decoder's architecture, as given by its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str  # a key of layers.mlp.GATES, or of PLAIN without a gate
    norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: torch.dtype  # of the checkpoint
    traits: Traits
    quantization: Quantization = UNQUANTIZED
    wrapped: bool = False  # inside of a model of texts and images, of which Kiln serves the text
    image_token_ids: frozenset[int] = frozenset()  # tokens that stand for images

    @property
    def max_positions(self) -> int:
        """The longest context of the model, in tokens."""
        return self.rope.max_positions

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """How each layer rotates queries and keys; None: not at all."""
        return self.traits.ropes or (self.rope,) * self.num_layers

    def long_start(self, max_model_len: int) -> int:
        """Return the length from which on requests have other rotary frequencies; 0: none has.

        ``max_model_len``: the longest request. All lengths are in tokens.
        """
        found = max((one.short_context for one in self.ropes if one is not None), default=0)
        return found if found < max_model_len else 0

    @property
    def query_scalings(self) -> tuple[QueryScaling | None, ...]:
        """How the queries of each layer grow with their position; None: not at all."""
        return self.traits.query_scalings or (None,) * self.num_layers

    @property
    def windows(self) -> Windows:
        """One attention window per layer; None: full attention."""
        return self.traits.windows or (None,) * self.num_layers

    @property
    def soft_caps(self) -> tuple[float, ...]:
        """The soft cap of each layer's attention; 0: none."""
        return (self.traits.soft_cap,) * self.num_layers

    @property
    def attention(self) -> AttentionShape:
        """The heads and windows of the attention layers."""
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.windows)


def read_head_dim(fields: Fields) -> int:
    """Return the elements of a head. Raises ModelError."""
    num_heads, hidden_size = fields.count("num_attention_heads"), fields.count("hidden_size")
    if "head_dim" not in fields and hidden_size % num_heads:
        raise fields.error("hidden_size", f"want a multiple of {num_heads} heads, or head_dim")
    return fields.count("head_dim", hidden_size // num_heads)


def read_config(
    fields: Fields,
    traits: Traits,
    quantization: Quantization,
    *,
    wrapped: bool = False,
    image_token_ids: frozenset[int] = frozenset(),
) -> HFConfig:
    """Read the fields that all decoders share. Raises ModelError naming the field."""
    for name, wanted in (("is_causal", True), ("use_bidirectional_attention", False)):
        if fields.flag(name, wanted) is not wanted:
            raise fields.error(name, "in Kiln tokens see only those before them")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"want a divisor of {num_heads} heads")
    head_dim = read_head_dim(fields)
    check_layer_types(fields, traits.windows)
    activation = fields.text("hidden_act", "silu")
    supported = GATES if traits.gated else PLAIN
    if activation not in supported:
        raise fields.error("hidden_act", f"Kiln supports {', '.join(supported)}")
    return HFConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=activation,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=traits.rope
        or next(filter(None, traits.ropes), None)  # all layers reach equally far
        or read_rope(fields, head_dim),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=_read_dtype(fields),
        traits=traits,
        quantization=quantization,
        wrapped=wrapped,
        image_token_ids=image_token_ids,
    )


def _read_dtype(fields: Fields) -> torch.dtype:
    """Read ``dtype`` (transformers 5) or ``torch_dtype`` (4)."""
    name = "dtype" if "dtype" in fields else "torch_dtype"
    text = fields.text(name).removeprefix("torch.")
    if text not in DTYPES:
        raise fields.error(name, f"Kiln supports {', '.join(DTYPES)}")
    return DTYPES[text]
