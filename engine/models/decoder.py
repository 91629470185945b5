"""The decoder that Llama, Mistral and Qwen share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kiln.engine.models.block import DecoderBlock
from kiln.engine.models.build import Builder


class Decoder:
    """A stack of decoder blocks between the embedding and the LM head."""

    def __init__(self, build: Builder, on_layer: Callable[[int], None]) -> None:
        """Build every layer; ``on_layer`` gets the number of loaded ones. Raises ModelError."""
        self.embedding = build.embedding()
        self.blocks: list[DecoderBlock] = []
        for layer in range(build.num_layers):
            self.blocks.append(build.block(layer))
            on_layer(layer + 1)
        self.attention_layers = [block.attention.attention for block in self.blocks]
        self.norm = build.stream_norm("model.norm")
        self.head = build.head(self.embedding)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [num_tokens, hidden_size]."""
        x = self.embedding(token_ids)
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x = block(positions, x, residual)
        self.norm.add(x, residual)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        return self.head(hidden)
