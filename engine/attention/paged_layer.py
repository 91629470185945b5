"""An attention layer bound to its layer of the KV pool; the attention operator runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from kiln.engine.attention.context import AttentionStep
from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.attention.rotate_and_store import choose_store
from kiln.engine.kv.pool import KVPool

Attend = Callable[[Any, torch.Tensor, torch.Tensor], None]
"""(the step's plan, query, out), both [num_tokens, num_heads, head_dim]: write out."""


class Attention(Protocol):
    """An attention implementation, created once per engine."""

    def plan(self, metadata: AttentionMetadata) -> Any:
        """Plan a step for all layers; on a GPU this launches kernels."""

    def bind(self, layer: AttentionLayer, pool: KVPool, dtype: torch.dtype) -> Attend:
        """Return a function that computes a layer's attention over keys and values in the pool.

        A row of its output depends only on the slots of its own request. Raises ValueError and
        TypeError if the pool does not fit the layer.
        """


class PagedLayer:
    """A layer whose kernels are chosen here, once, when the model is loaded."""

    def __init__(
        self, layer: AttentionLayer, pool: KVPool, attention: Attention, dtype: torch.dtype
    ) -> None:
        shape = layer.shape
        self._head_dim = shape.head_dim
        self._counts = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self._store = choose_store(layer, pool, dtype)
        self._attend = attention.bind(layer, pool, dtype)

    def __call__(
        self, step: AttentionStep, qkv: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Do what ``torch.ops.kiln.attention`` does for this layer."""
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        query, key, value = heads.split(self._counts, dim=1)
        query = self._store(positions, step.metadata.slot_mapping, query, key, value)
        self._attend(step.plan, query, out.view(query.shape))


def bind_layers(
    layers: Sequence[AttentionLayer], pool: KVPool, attention: Attention, dtype: torch.dtype
) -> tuple[PagedLayer, ...]:
    """Bind the attention layers of a model that computes in ``dtype`` to a pool.

    Raises ValueError and TypeError if the pool does not fit the layers.
    """
    return tuple(PagedLayer(layer, pool, attention, dtype) for layer in layers)
