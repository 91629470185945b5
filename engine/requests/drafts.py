"""Drafts: tokens that a step computes before anybody knows that they will be sampled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from kiln.engine.requests.batch import Batch, SampledTokens
from kiln.engine.requests.late_masks import MaskSource
from kiln.engine.requests.request import Request


class Draft(NamedTuple):
    """How many drafts follow a request's last token, and which; () if the device makes them.

    If the last token is pending, ``token_ids`` begin with a guess of it.
    """

    num_tokens: int
    token_ids: tuple[int, ...] = ()


NO_DRAFT = Draft(0)


class Drafter(Protocol):
    """Proposes the drafts of requests. A wrong draft costs time and changes no token.

    ``wanted``: how many drafts the device makes behind the step that has begun, for the next one.
    ``num_tokens``: at most, of a request in one step.
    """

    wanted: int
    num_tokens: int

    def begin(self, num_rows: int, *, with_prompts: bool) -> None:
        """Begin a step of ``num_rows`` running requests, which may compute prompts too."""

    def propose(self, request: Request, most: int) -> Draft:
        """Return at most ``most`` drafts behind a request's last token.

        The host does not know the last token while ``request.num_pending`` is above 0.
        """

    def observe(self, batch: Batch, sampled: Mapping[str, SampledTokens]) -> None:
        """Learn which tokens a step with drafts has sampled, by request."""


def drafts_of(request: Request, drafter: Drafter, masks: MaskSource | None, most: int) -> Draft:
    """Return at most ``most`` drafts for the next step of a request, within its length limit.

    There are none before ``min_tokens`` is reached, because stop tokens are banned until then. A
    request with late masks has those that are forced, because its masks depend on them.
    """
    if len(request.token_ids) < request.min_total_tokens:
        return NO_DRAFT
    length = len(request.token_ids) + request.num_pending
    most = min(most, request.max_total_tokens - length - 1)
    if most <= 0:
        return NO_DRAFT
    if not request.is_late or masks is None:
        return drafter.propose(request, most)
    tokens = tuple(masks.forced(request, min(most, drafter.num_tokens)))
    return Draft(len(tokens) - (request.num_pending > 0), tokens) if tokens else NO_DRAFT


def computes_prompts(running: Iterable[Request]) -> bool:
    """Whether the next step computes more of a running request than its last token."""
    return any(
        one.num_computed_tokens + 1 < len(one.token_ids) + one.num_pending for one in running
    )
