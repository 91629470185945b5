"""The one ambient context: what attention reads of the step that is running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.kv.pool import KVPool


class StepAttention(Protocol):
    """One step's attention, planned."""

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Return every token's causal attention over the pool; see ``attend``."""


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """The step's metadata, the pool that it writes, and what reads the pool."""

    metadata: AttentionMetadata
    pool: KVPool
    step: StepAttention


class Attention(Protocol):
    """A way to compute attention, made once for an engine."""

    def context(self, metadata: AttentionMetadata, pool: KVPool) -> AttentionContext:
        """Plan a step."""


_current: ContextVar[AttentionContext] = ContextVar("kiln_attention_context")


@contextmanager
def attention_context(context: AttentionContext) -> Iterator[None]:
    """Make a context the current one for the length of a ``with`` block."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> AttentionContext:
    """Return the running step's context. Raises LookupError outside of a step."""
    return _current.get()


def attend(layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Return every token's causal attention over the pool, which has the step's keys already.

    query and result: [num_tokens, num_heads, head_dim]. ``window`` is how many keys a token sees,
    itself included; None: all. A row's result depends on its own request's slots alone.
    """
    return current().step.attend(layer, query, scale, window)
