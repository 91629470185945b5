"""How far a request's output has come in its grammar, and the masks of what may follow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kiln.engine.errors import RequestError
from kiln.engine.grammar.vocabulary import check
from kiln.engine.requests.request import Request
from kiln.engine.requests.structured_outputs import FIELD

SLOW = 0.002  # processor seconds for one mask, above which a request is slow
_QUICK_AGAIN = 32  # masks that must be quick before a slow request is not slow any more
_LIMIT = 5.0  # seconds for which a request may wait for one mask


@dataclass(slots=True, eq=False)
class Constraint:
    """The state of one request; only one thread at a time works on it.

    ``matcher`` has consumed ``num_consumed`` tokens of the output. ``made`` are the last masks,
    behind so many tokens and these drafts; ``forced`` are the tokens that must follow, in all
    likelihood. ``stop_bits``: the tokens that may end the output, as a mask. A request is slow for
    its next ``slow`` masks: it runs only when they are ready. ``guess`` is what its newest token
    was taken to be before it was known: how many tokens there are with it, and the token. After a
    wrong one there are none for ``pause`` times, twice as long each time.
    """

    num_bytes: int  # of a mask
    stop_bits: np.ndarray
    matcher: Any = None
    num_consumed: int = 0
    made: tuple[int, tuple[int, ...], list[bytes]] | None = None
    forced: Sequence[int] = ()
    wants_forced: bool = False
    error: Exception | None = None
    job: Future[None] | None = None
    started: float = 0.0
    slow: int = 0
    guess: tuple[int, int] | None = None
    pause: int = 0
    pauses: int = field(default=1)

    @property
    def is_busy(self) -> bool:
        """Whether a job works on it."""
        return self.job is not None and not self.job.done()

    def masks_behind(self, num_tokens: int, drafts: Sequence[int]) -> list[bytes] | None:
        """Return the masks behind so many tokens and each of the drafts, if they are made."""
        if self.made is None or self.made[:2] != (num_tokens, tuple(drafts)):
            return None
        return self.made[2]

    def give_up(self) -> None:
        """Fail if a job has worked for too long."""
        if self.is_busy and time.monotonic() - self.started > _LIMIT:
            self.error = RequestError(
                f"{FIELD}: the grammar took more than {_LIMIT:g} s for one token: simplify it",
                FIELD,
            )

    def unread(self, request: Request) -> list[int]:
        """Return the output of a request that it has not consumed; all of it to begin anew."""
        if request.num_output_tokens < self.num_consumed:  # its last token was taken back
            return request.token_ids[request.num_prompt_tokens :]
        return request.token_ids[request.num_prompt_tokens + self.num_consumed :]

    def make(self, num_tokens: int, unread: list[int], drafts: Sequence[int]) -> None:
        """Make the masks behind an output of so many tokens and each of the drafts.

        ``unread`` is its end. An error is kept.
        """
        began = time.thread_time()  # of the processor: other threads may be busy too
        try:
            self._consume(num_tokens, unread)
            masks = [self._mask()]
            for draft in drafts[: self.matcher.validate_tokens(list(drafts))]:
                self.matcher.consume_token(draft)
                masks.append(self._mask())
            self.matcher.rollback(len(masks) - 1)
            self.forced = self.matcher.compute_ff_tokens() if self.wants_forced else ()
            # A draft that may not follow is rejected, and so is what is drawn behind it.
            masks += [b"\xff" * self.num_bytes] * (len(drafts) + 1 - len(masks))
            self.made = num_tokens, tuple(drafts), masks
        except Exception as error:
            self.error = error
        took = time.thread_time() - began
        self.slow = _QUICK_AGAIN if took > SLOW * len(drafts) + SLOW else max(self.slow - 1, 0)

    def _consume(self, num_tokens: int, unread: list[int]) -> None:
        if self.num_consumed + len(unread) != num_tokens:
            self.matcher.reset()
        if unread and not self.matcher.consume_tokens(unread):
            check(self.matcher)
        self.num_consumed = num_tokens

    def _mask(self) -> bytes:
        mask: bytes = self.matcher.compute_bitmask()
        check(self.matcher)
        bits = np.frombuffer(mask[: self.num_bytes].ljust(self.num_bytes, b"\0"), np.uint8)
        if self.matcher.is_accepting():
            bits = bits | self.stop_bits
        return bits.tobytes()
