"""torch.ops.kiln.lora_linear and lora_embedding: what the adapters of a step add to a layer.

For ``torch.compile`` each is one opaque operator. Like attention, it reads the step from a context
and not from arguments. Outside of a step with adapters it does nothing, so that a CUDA graph
captured there contains nothing of it.

The layer is told by a tensor, ``rows`` of its Site, and not by a number: tensors are inputs of a
compiled piece, so that equal layers share one. The host knows it by its address.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch


class LoRAStep(Protocol):
    """The adapters of a running step, as the operators use them."""

    def add_linear(self, rows: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapters' parts of a projection to ``out``."""

    def add_embedding(self, rows: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapters' parts of the embedding to ``out``."""


_current: ContextVar[LoRAStep | None] = ContextVar("kiln_lora_step", default=None)


@contextmanager
def lora_step(step: LoRAStep | None) -> Iterator[None]:
    """Make ``step`` the current one inside a ``with`` block; None: no request has an adapter."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def add_linear(x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> None:
    """Add to out [num_tokens, out_size]; x: [num_tokens, in_size]."""
    step = _current.get()
    if step is not None:
        step.add_linear(rows, x, out)


def add_embedding(token_ids: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> None:
    """Add to out [num_tokens, hidden_size]; token_ids: [num_tokens] int64."""
    step = _current.get()
    if step is not None:
        step.add_embedding(rows, token_ids, out)


def _fake(x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> None:
    """Do nothing on fake tensors: the only result is an argument."""


for _name, _function in (
    ("kiln::lora_linear", add_linear),
    ("kiln::lora_embedding", add_embedding),
):
    torch.library.define(_name, "(Tensor x, Tensor(a!) out, Tensor rows) -> ()")
    for _key in ("CPU", "CUDA"):
        torch.library.impl(_name, _key, _function)
    torch.library.register_fake(_name, _fake)

lora_linear = torch.ops.kiln.lora_linear.default
lora_embedding = torch.ops.kiln.lora_embedding.default

OPENED = {lora_linear: add_linear, lora_embedding: add_embedding}
"""What each operator runs, for those who record a graph on a CPU."""
