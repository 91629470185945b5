"""config.json of a decoder as one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.kv.shape import AttentionShape
from kiln.engine.layers.mlp import GATES
from kiln.engine.models.experts import Experts
from kiln.engine.models.fields import Fields
from kiln.engine.models.quantization import UNQUANTIZED, Quantization
from kiln.engine.models.rope_config import RopeConfig, read_rope
from kiln.engine.models.windows import check_layer_types

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Traits:
    """The differences between decoder families.

    ``windows`` has one entry per layer: how many keys a token attends to, itself included, or None
    for all. Empty: every layer has full attention.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # an RMS norm over each head's query and key, before rotation
    windows: tuple[int | None, ...] = ()
    experts: Experts | None = None


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
    activation: str  # a key of layers.mlp.GATES
    norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: torch.dtype  # of the checkpoint
    traits: Traits
    quantization: Quantization = UNQUANTIZED

    @property
    def max_positions(self) -> int:
        """The longest context of the model, in tokens."""
        return self.rope.max_positions

    @property
    def windows(self) -> tuple[int | None, ...]:
        """One attention window per layer, in tokens; None: full attention."""
        return self.traits.windows or (None,) * self.num_layers

    @property
    def attention(self) -> AttentionShape:
        """The heads and windows of the attention layers."""
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.windows)


def read_config(fields: Fields, traits: Traits, quantization: Quantization) -> HFConfig:
    """Read the fields that all decoders share. Raises ModelError naming the field."""
    if not fields.flag("is_causal", True):
        raise fields.error("is_causal", "in Kiln tokens see only those before them")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"want a divisor of {num_heads} heads")
    hidden_size = fields.count("hidden_size")
    if "head_dim" not in fields and hidden_size % num_heads:
        raise fields.error("hidden_size", f"want a multiple of {num_heads} heads, or head_dim")
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    check_layer_types(fields, traits.windows)
    activation = fields.text("hidden_act", "silu")
    if activation not in GATES:
        raise fields.error("hidden_act", f"Kiln supports {', '.join(GATES)}")
    return HFConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=activation,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields, head_dim),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=_read_dtype(fields),
        traits=traits,
        quantization=quantization,
    )


def _read_dtype(fields: Fields) -> torch.dtype:
    """Read ``dtype`` (transformers 5) or ``torch_dtype`` (4)."""
    name = "dtype" if "dtype" in fields else "torch_dtype"
    text = fields.text(name).removeprefix("torch.")
    if text not in DTYPES:
        raise fields.error(name, f"Kiln supports {', '.join(DTYPES)}")
    return DTYPES[text]
