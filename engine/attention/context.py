"""The only global context: what the attention operator reads about the current step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from kiln.engine.attention.metadata import AttentionMetadata

StepLayer = Callable[["AttentionStep", torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(step, qkv, positions, out): do what ``torch.ops.kiln.attention`` does, for one attention layer
of a model that is bound to its layer of the KV pool."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """A step of one model: its attention layers, the step's requests, and the plan for them."""

    layers: Sequence[StepLayer]
    metadata: AttentionMetadata
    plan: Any  # made by the attention implementation of the layers


_current: ContextVar[AttentionStep] = ContextVar("kiln_attention_step")


@contextmanager
def attention_step(step: AttentionStep) -> Iterator[None]:
    """Make ``step`` the current step inside a ``with`` block."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def current_step() -> AttentionStep:
    """Return the running step. Raises LookupError outside of a step."""
    return _current.get()
