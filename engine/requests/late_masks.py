"""Masks that are made while the forward pass of their step runs, from the tokens before it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, repeat
from typing import NamedTuple, Protocol

from kiln.engine.requests.batch import Batch, SampledTokens, ScheduledRequest
from kiln.engine.requests.request import NewRequest, Request
from kiln.engine.requests.rerun import blame

Mask = bytes | memoryview
LateMasks = Mapping[str, Sequence[Mask]]
"""Request id -> for each sample of its row, the tokens that may be drawn: 32-bit words, one bit for
each token of the vocabulary, lowest bit first."""


_LEAST = 0.004  # seconds


class Wanted(NamedTuple):
    """The masks of a request's next samples: behind its last token, and behind each draft."""

    request: Request
    drafts: Sequence[int]


class MaskSource(Protocol):
    """Decides which tokens requests may draw, one after the other."""

    def begin(self, new: NewRequest) -> bool:
        """Prepare for a request; return whether any token of it depends on the source."""

    def end(self, request_id: str) -> None:
        """Forget a request, which has ended. An unknown id is ignored."""

    def may_run(self, request: Request) -> bool:
        """Whether a step may sample for a request; if not, the other requests need not wait."""

    def wait(self) -> None:
        """Wait, for a moment at most, until a request may run that may not run now."""

    def masks(
        self, wanted: Sequence[Wanted], patience: float
    ) -> Mapping[str, Sequence[Mask] | Exception]:
        """Return the masks that are made within so many seconds, by request id.

        An exception ends its request. A request that is missing takes no token from this step.
        """

    def forced(self, request: Request, most: int) -> Sequence[int]:
        """Return tokens that must follow, in all likelihood, to be computed as drafts.

        At most ``most`` of them, and before them a guess of the request's last token if that is
        still pending. All pending tokens are taken to be forced too; () if that is not so.
        """


class Pace:
    """How long steps take, and so how long one may wait for masks."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._mean = _LEAST

    def tick(self) -> None:
        """Note the end of a step."""
        now = time.monotonic()
        # A long one, or a time without work, says little.
        took = min(now - self._last, 2 * self._mean)
        self._last, self._mean = now, max(self._mean + (took - self._mean) / 8, _LEAST)

    @property
    def patience(self) -> float:
        """Seconds: most of a step, as masks are made while the forward pass runs."""
        return 0.75 * self._mean


class Bound(NamedTuple):
    """The masks of a step, and the requests without one.

    ``failed`` ends their requests. ``missed`` take no token from this step: their masks are not
    ready, or the step has computed a guess of their last token, and it was another.
    """

    masks: LateMasks
    failed: Mapping[str, SampledTokens]
    missed: Sequence[str]

    def applied(self, tokens: Iterable[SampledTokens]) -> tuple[SampledTokens, ...]:
        """Return the tokens of the step without those that do not count."""
        kept = (one for one in tokens if one.request_id not in self.missed)
        return tuple(self.failed.get(one.request_id, one) for one in kept)


def late_masks(
    source: MaskSource, batch: Batch, running: Mapping[str, Request], patience: float
) -> Bound:
    """Return the masks of a step, made within ``patience`` seconds.

    All steps before it are committed. A request that has ended or was preempted gets no mask,
    because the token that it draws is dropped.
    """
    rows: dict[str, ScheduledRequest] = {}
    wanted, missed = [], []
    for row in batch.requests:
        request = running.get(row.request_id)
        if not row.is_late or not row.num_samples or request is None or request.row != row.row:
            continue
        rows[row.request_id] = row
        if _is_misled(row, request):
            missed.append(row.request_id)
        else:
            wanted.append(
                Wanted(request, row.token_ids[len(row.token_ids) - row.num_samples + 1 :])
            )
    made = source.masks(wanted, patience) if wanted else {}
    masks = {name: one for name, one in made.items() if not isinstance(one, Exception)}
    failed = {
        name: blame(rows[name], one) for name, one in made.items() if isinstance(one, Exception)
    }
    return Bound(masks, failed, [*missed, *(rows.keys() - made.keys() - set(missed))])


def rows_of(masks: LateMasks, batch: Batch) -> list[Mask | None]:
    """Return the mask of each sample of a step, in order; None: any token may be drawn."""
    none = repeat(None)
    rows: list[Mask | None] = []
    for row in batch.requests:
        rows += islice(masks.get(row.request_id, none), row.num_samples)
    return rows


def _is_misled(row: ScheduledRequest, request: Request) -> bool:
    """Whether a row was made with a guess of its last token before the drafts, and it is wrong."""
    if not row.token_ids:
        return False
    last = row.num_tokens - row.num_samples
    position = row.num_computed_tokens + last
    known = request.token_ids
    return len(known) != position + 1 or known[position] != row.token_ids[last]
