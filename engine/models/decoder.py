"""The decoder: embedding, the blocks of a family, a last norm, and the LM head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.layers.layer_norm import StreamLayerNorm
from kiln.engine.layers.norm import StreamNorm
from kiln.engine.layers.partial_sum import Sum, values_of
from kiln.engine.models.block import Block
from kiln.engine.models.build import Builder
from kiln.engine.models.build_layer import LayerBuilder


@dataclass(eq=False)
class Decoder:
    """A stack of blocks between the embedding and the LM head."""

    embedding: Callable[[torch.Tensor], Sum]
    blocks: Sequence[Block]
    norm: StreamNorm | StreamLayerNorm
    head: Callable[[torch.Tensor], torch.Tensor]
    attention_layers: Sequence[AttentionLayer]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [num_tokens, hidden_size]."""
        x = self.embedding(token_ids)
        residual = torch.zeros_like(values_of(x))
        for block in self.blocks:
            x = block(positions, x, residual)
        return self.norm(x, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        return self.head(hidden)


def build_decoder(
    build: Builder, make_block: Callable[[LayerBuilder], Block], on_layer: Callable[[int], None]
) -> Decoder:
    """Build every layer; ``on_layer`` gets the number of loaded ones. Raises ModelError."""
    embedding, blocks, attention = build.embedding(), [], []
    for layer in range(build.config.num_layers):
        parts = LayerBuilder(build, layer)
        blocks.append(make_block(parts))
        attention += parts.attention_layers
        on_layer(layer + 1)
    return Decoder(embedding, blocks, build.stream_norm("model.norm"), build.head(), attention)
