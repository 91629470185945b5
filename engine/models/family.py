"""What a model family must declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.models.block import Block
from kiln.engine.models.build import Builder
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.decoder import build_decoder
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits


class Model(Protocol):
    """The interface of a model to the runner.

    ``torch.compile`` can trace ``forward`` as one graph for any number of tokens.
    """

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The attention layers, in the order of their index."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [num_tokens, hidden_size].

        A position is a row of rotary tables: see layers/rotary.py.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""


def with_head(architecture: str) -> str:
    """Return the architecture with a head of one that ends at the hidden states: ``Qwen3Model``."""
    stem = architecture.removesuffix("Model")
    return architecture if stem == architecture else f"{stem}ForCausalLM"


OnLayer = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: its ``architectures`` in config.json, and its differences from others.

    ``traits`` reads what differs, ``block`` builds a layer. ``keys`` holds the supported keys of
    config.json that ``config_keys`` does not list, and keys with a default specific to the family.
    Each maps to transformers' default for an absent key, or to None without one. ``ignored`` are
    keys of published files that transformers does not read. ``names`` says what a key that all
    families share is called in this one. ``wrappers`` are architectures of texts and images in
    which the family is the part for texts, under ``text_config``; they do not read the keys
    ``of_head``. ``image_tokens`` are the keys of a wrapper's config.json for tokens that stand for
    images, with transformers' defaults. ``unused`` is a regular expression of tensors that the
    model leaves out; with a group ``layer``, only those of layers behind the last. ``model_type``
    in config.json stands for a missing list of architectures.
    """

    architectures: tuple[str, ...]
    traits: Callable[[Fields], Traits]
    block: Callable[[LayerBuilder], Block]
    keys: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    of_head: tuple[str, ...] = ()
    image_tokens: Mapping[str, int] = field(default_factory=dict)
    unused: str = ""
    model_type: str = ""

    def build(self, build: Builder, on_layer: OnLayer) -> Model:
        """Make a model, or a rank's part of it; ``on_layer`` gets the number of loaded layers.

        Raises ModelError.
        """
        return build_decoder(build, self.block, on_layer)
