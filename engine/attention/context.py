"""The one ambient context: what attention reads of the step that is running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.attention.plan import AttentionPlan
from kiln.engine.attention.workspace import Workspace
from kiln.engine.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """The step's metadata, the pool it reads and writes, and a plan for each window in use."""

    metadata: AttentionMetadata
    pool: KVPool
    plans: Mapping[int | None, AttentionPlan]
    workspace: Workspace


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
