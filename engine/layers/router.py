"""Which experts a token is sent to, with which weights, and torch.ops.kiln.route within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kiln.engine.layers.linear import Linear
from kiln.engine.layers.opaque import opaque_operator
from kiln.jit_kernels.ops.moe.functions import route_tokens


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen and weighed, as ``route_tokens`` takes it.

    For a softmax over the logits of the chosen experts alone, renormalise that over all: it is the
    same.
    """

    top_k: int
    scoring: str = "softmax"  # or "sigmoid"
    groups: tuple[int, int] = (1, 1)  # of experts: how many there are, and how many are eligible
    by_largest: bool = False  # rank a group by its largest score, not by the sum of its two largest
    renormalise: bool = True  # divide the weights of a token by their sum, or by least_sum
    least_sum: float = 0.0
    factor: float = 1.0  # of the weights


def _route(  # noqa: PLR0913 (see Routing)
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    scoring: str,
    groups: Sequence[int],
    by_largest: bool,
    renormalise: bool,
    least_sum: float,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    count, kept = groups
    return route_tokens(
        logits, top_k, scoring, bias, (count, kept), renormalise, factor, by_largest, least_sum
    )


def _fake(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, *others: object
) -> tuple[torch.Tensor, torch.Tensor]:
    size = (logits.shape[0], top_k)
    weights, ids = logits.new_empty(size, dtype=torch.float32), logits.new_empty(size)
    return weights, ids.to(torch.int32)


opaque_operator(
    "route(Tensor logits, Tensor? bias, int top_k, str scoring, int[] groups, bool by_largest,"
    " bool renormalise, float least_sum, float factor) -> (Tensor, Tensor)",
    _route,
    _fake,
)


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses the experts of each token.

    ``choice_bias`` [num_experts] float32 is added to the scores for the choice only. With
    ``in_float32`` the weights of ``linear`` are float32, and so are the products.
    """

    linear: Linear  # hidden to num_experts
    routing: Routing
    choice_bias: torch.Tensor | None = None
    in_float32: bool = False

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights float32 and ids int32, [num_tokens, top_k] each, of x [num_tokens, in]."""
        logits = self.linear(x.float() if self.in_float32 else x)
        how = self.routing
        weights, ids = torch.ops.kiln.route.default(
            logits,
            self.choice_bias,
            how.top_k,
            how.scoring,
            how.groups,
            how.by_largest,
            how.renormalise,
            how.least_sum,
            how.factor,
        )
        return weights, ids
