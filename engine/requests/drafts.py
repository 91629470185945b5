"""Drafts: tokens that a step computes before anybody knows that they will be sampled."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kiln.engine.requests.request import Request


class Draft(NamedTuple):
    """How many drafts follow a request's last token, and which; () if the device makes them."""

    num_tokens: int
    token_ids: tuple[int, ...] = ()


class Drafter(Protocol):
    """Proposes the drafts of requests. A wrong draft costs time and changes no token."""

    def propose(self, request: Request, most: int) -> Draft:
        """Return at most ``most`` drafts behind a request's last token.

        The host does not know the last token while ``request.num_pending`` is above 0.
        """


NO_DRAFT = Draft(0)


def drafts_of(request: Request, drafter: Drafter, most: int) -> Draft:
    """Return at most ``most`` drafts for the next step of a request, within its length limit.

    There are none before ``min_tokens`` is reached, because stop tokens are banned until then. A
    request with late masks gets only drafts that the host knows, because the masks depend on them.
    """
    if len(request.token_ids) < request.min_total_tokens:
        return NO_DRAFT
    length = len(request.token_ids) + request.num_pending
    most = min(most, request.max_total_tokens - length - 1)
    if most <= 0 or (request.is_late and request.num_pending):
        return NO_DRAFT
    draft = drafter.propose(request, most)
    return NO_DRAFT if request.is_late and not draft.token_ids else draft
