"""torch.ops.kiln.lora_linear and lora_embedding: layers with what the adapters of a step add.

For ``torch.compile`` each is one opaque operator. Like attention, it reads the step from a context
and not from arguments. Outside of a step with adapters it is the layer alone, so that a CUDA graph
captured there contains nothing else. A projection is part of its operator because A can run beside
it: both read x alone.

The layer is told by a tensor, ``rows`` of its Site, and not by a number: tensors are inputs of a
compiled piece, so that equal layers share one. The host knows it by its address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from kiln.engine.layers.opaque import opaque_operator
from kiln.engine.layers.weight import Tensors
from kiln.engine.layers.weight_parts import weight_of


class LoRAStep(Protocol):
    """The adapters of a running step, as the operators use them."""

    def run_linear(
        self, base: Callable[[], None], x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Run a projection: ``base``, which writes to ``out``, and the adapters' parts."""

    def add_embedding(self, rows: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapters' parts of the embedding to ``out``."""


_current: ContextVar[LoRAStep | None] = ContextVar("kiln_lora_step", default=None)


@contextmanager
def lora_step(step: LoRAStep) -> Iterator[None]:
    """Make ``step`` the current one inside a ``with`` block."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def run_linear(
    x: torch.Tensor,
    tensors: Tensors,
    bias: torch.Tensor | None,
    form: str,
    rows: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write to out [num_tokens, out_size]; x: [num_tokens, in_size]; the rest: as in Linear.

    ``tensors`` and ``form`` are those of its Weight.
    """

    def base() -> None:
        weight_of(form, tensors).product(x, out, bias)

    step = _current.get()
    if step is None:
        base()
    else:
        step.run_linear(base, x, rows, out)


def add_embedding(token_ids: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> None:
    """Add to out [num_tokens, hidden_size]; token_ids: [num_tokens] int64."""
    step = _current.get()
    if step is not None:
        step.add_embedding(rows, token_ids, out)


lora_linear = opaque_operator(
    "lora_linear(Tensor x, Tensor?[] tensors, Tensor? bias, str form, Tensor rows, Tensor(a!) out)"
    " -> ()",
    run_linear,
)
lora_embedding = opaque_operator(
    "lora_embedding(Tensor token_ids, Tensor(a!) out, Tensor rows) -> ()", add_embedding
)

OPENED: dict[Any, Callable[..., None]] = {lora_linear: run_linear, lora_embedding: add_embedding}
"""What each operator runs, for those who record a graph on a CPU."""
