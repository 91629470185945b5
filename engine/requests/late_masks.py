"""Masks that are made while the forward pass of their step runs, from the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, repeat
from typing import Protocol

from kiln.engine.requests.batch import Batch, SampledTokens, ScheduledRequest
from kiln.engine.requests.request import NewRequest, Request
from kiln.engine.requests.rerun import blame

LateMasks = Mapping[str, Sequence[bytes]]
"""Request id -> for each sample of its row, the tokens that may be drawn: 32-bit words, one bit for
each token of the vocabulary, lowest bit first."""


class MaskSource(Protocol):
    """Decides which tokens requests may draw, one after the other."""

    def limits(self, new: NewRequest) -> bool:
        """Whether any token of a request depends on it."""

    def masks(self, request: Request, token_ids: Sequence[int], count: int) -> Sequence[bytes]:
        """Return the masks of a request's ``count`` next samples.

        ``token_ids`` are prompt, output and drafts. The first sample follows all of them but the
        last ``count - 1``, and each further sample one token more. An exception ends the request.
        """


def late_masks(
    source: MaskSource, batch: Batch, running: Mapping[str, Request]
) -> tuple[LateMasks, dict[str, SampledTokens]]:
    """Return the masks of a step, and the outputs of requests whose mask could not be made.

    All steps before it are committed. A request that has ended or was preempted gets no mask,
    because the token that it draws is dropped.
    """
    masks: dict[str, Sequence[bytes]] = {}
    failed: dict[str, SampledTokens] = {}
    for row in batch.requests:
        request = running.get(row.request_id)
        if not row.is_late or not row.num_samples or request is None or request.row != row.row:
            continue
        tokens = [*request.token_ids, *_drafts(row)]
        try:
            masks[row.request_id] = source.masks(request, tokens, row.num_samples)
        except Exception as error:
            failed[row.request_id] = blame(row, error)
    return masks, failed


def rows_of(masks: LateMasks, batch: Batch) -> list[bytes | None]:
    """Return the mask of each sample of a step, in order; None: any token may be drawn."""
    none = repeat(None)
    rows: list[bytes | None] = []
    for row in batch.requests:
        rows += islice(masks.get(row.request_id, none), row.num_samples)
    return rows


def _drafts(row: ScheduledRequest) -> list[int]:
    return row.token_ids[len(row.token_ids) - row.num_samples + 1 :]
