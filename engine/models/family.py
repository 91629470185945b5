"""What a family of models must declare to be served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.models.decoder import Decoder
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import HFConfig, Traits
from kiln.engine.models.weights import Weights


class Model(Protocol):
    """What the runner needs of a model.

    ``torch.compile`` can trace ``forward`` for any number of tokens, in one graph.
    """

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The attention layers, by their index."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states [num_tokens, hidden_size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""


OnLayer = Callable[[int], None]
Build = Callable[[HFConfig, Weights, int, torch.device, OnLayer], Model]


@dataclass(frozen=True, slots=True)
class Family:
    """A family: the ``architectures`` of config.json that it serves, and what differs in it.

    ``keys`` holds the keys of config.json that ``config_keys`` does not list and this family
    supports, and any key whose default is the family's own. Each maps to the value that
    transformers takes where the key is absent, or to None where it has none.
    """

    architectures: tuple[str, ...]
    traits: Callable[[Fields], Traits]
    keys: Mapping[str, Any] = field(default_factory=dict)
    build: Build = Decoder  # (config, weights, max_model_len, device, on_layer) -> model
