"""Steps that were scheduled and not committed yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Set
from typing import NamedTuple

from kiln.engine.requests.batch import Batch
from kiln.engine.requests.request import Request


class ScheduledStep(NamedTuple):
    """A batch, and the request of each of its rows; None if the row counts no more."""

    batch: Batch
    requests: list[Request | None]

    def still_valid(self, live: Mapping[str, Request]) -> Batch:
        """Return the rows that can be computed now, all tokens known and without drafts.

        Requests that are not among the ``live`` ones or were preempted are left out.
        """
        rows = []
        for row, request in zip(self.batch.requests, self.requests, strict=True):
            if request and live.get(row.request_id) is request and request.row == row.row:
                # Drafts of the step before may have been rejected since the row was made.
                start = request.num_computed_tokens - row.num_tokens
                tokens = request.token_ids[start : start + row.num_tokens]
                rejected = row.num_computed_tokens - start
                rows.append(
                    row._replace(
                        num_tokens=len(tokens),
                        num_computed_tokens=start,
                        token_ids=tokens,
                        num_samples=min(row.num_samples, 1),
                        num_output_tokens=row.num_output_tokens - rejected,
                    )
                )
        return Batch(tuple(rows))

    def drop(self, request_ids: Collection[str]) -> None:
        """Take no tokens for some of the requests, whose last token will be computed again.

        All steps before this one are committed, and none behind it is scheduled.
        """
        for index, request in enumerate(self.requests):
            if request is not None and request.request_id in request_ids:
                request.num_pending = 0
                request.num_computed_tokens = len(request.token_ids) - 1
                self.requests[index] = None

    def take_back(self) -> None:
        """Return the requests to where they were, so that they will be scheduled again."""
        for row, request in zip(self.batch.requests, self.requests, strict=True):
            if request is None:
                continue
            request.num_pending -= row.num_samples
            if request.row == row.row:  # neither ended nor preempted since
                request.num_computed_tokens -= row.num_tokens
                request.num_table_blocks = row.num_blocks


class ScheduledSteps(deque[ScheduledStep]):
    """The steps in flight, the oldest first."""

    def end(self, batch: Batch) -> list[Request | None]:
        """Return the requests of a batch; drop its step, and those ahead of it."""
        while self:
            made, requests = self.popleft()
            if made is batch:
                return requests
        return []

    def of(self, batch: Batch) -> ScheduledStep:
        """Return the step of a batch."""
        return next(step for step in self if step.batch is batch)

    def adapter_slots(self) -> Set[int]:
        """Return the adapter slots that the steps read; -1 is no slot."""
        return {row.adapter_slot for batch, _ in self for row in batch.requests}
