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
from kiln.engine.requests.late_masks import Mask
from kiln.engine.requests.request import Request
from kiln.engine.requests.structured_outputs import FIELD

_QUICK_AGAIN = 32  # masks that must be quick before a slow request is not slow any more
_LIMIT = 5.0  # seconds for which a request may wait for one mask


@dataclass(slots=True, eq=False)
class Constraint:
    """The state of one request; only one thread at a time works on it.

    ``matcher`` has consumed ``num_consumed`` tokens of the output. ``made`` are the last masks,
    behind so many tokens and these drafts; ``forced`` are the tokens that must follow, in all
    likelihood. ``stop_bits``: the tokens that may end the output, as a mask. A request is slow for
    its next ``slow`` masks: it runs only when they are ready. Its next mask is timed if it
    ``may_be_slow``. ``guess`` is what its newest token was taken to be before it was known: how
    many tokens there are with it, and the token. After a wrong one there are none for ``pause``
    times, twice as long each time.
    """

    num_bytes: int  # of a mask for the logits
    stop_bits: np.ndarray
    matcher: Any = None
    num_consumed: int = 0
    made: tuple[int, tuple[int, ...], list[Mask]] | None = None
    forced: Sequence[int] = ()
    wants_forced: bool = False
    error: Exception | None = None
    job: Future[None] | None = None
    started: float = 0.0
    slow: int = 0
    may_be_slow: bool = True
    guess: tuple[int, int] | None = None
    pause: int = 0
    pauses: int = field(default=1)

    @property
    def is_busy(self) -> bool:
        """Whether a job works on it."""
        return self.job is not None and not self.job.done()

    def masks_behind(self, num_tokens: int, drafts: Sequence[int]) -> list[Mask] | None:
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

    def make(self, num_tokens: int, unread: list[int], drafts: Sequence[int], limit: float) -> None:
        """Make the masks behind an output of so many tokens and each of the drafts.

        ``unread`` is its end. A mask that takes more than ``limit`` seconds of processor time makes
        the request slow. An error is kept.
        """
        began = time.thread_time()  # of the processor: other threads may be busy too
        try:
            self._consume(num_tokens, unread)
            masks = [self._mask()]
            for draft in drafts[: self.matcher.validate_tokens(list(drafts))]:
                self.matcher.consume_token(draft)
                masks.append(self._mask())
            self.matcher.rollback(len(masks) - 1)
            # A draft that may not follow is rejected, and so is what is drawn behind it.
            masks += [b"\xff" * self.num_bytes] * (len(drafts) + 1 - len(masks))
            self._keep(num_tokens, tuple(drafts), masks)
        except Exception as error:
            self.error = error
        took = time.thread_time() - began
        self.slow = _QUICK_AGAIN if took > limit * (1 + len(drafts)) else max(self.slow - 1, 0)
        self.may_be_slow = self.slow > 0

    def take(self, num_tokens: int, mask: np.ndarray) -> None:
        """Keep a mask that was made together with others, behind so many tokens; or its error."""
        self.num_consumed = num_tokens
        try:
            check(self.matcher)
            self._keep(num_tokens, (), [self._finished(mask)])
        except RequestError as error:
            self.error = error

    def _keep(self, num_tokens: int, drafts: tuple[int, ...], masks: list[Mask]) -> None:
        self.forced = self.matcher.compute_ff_tokens() if self.wants_forced else ()
        self.made = num_tokens, drafts, masks

    def _consume(self, num_tokens: int, unread: list[int]) -> None:
        if self.num_consumed + len(unread) != num_tokens:
            self.matcher.reset()
        if unread and not self.matcher.consume_tokens(unread):
            check(self.matcher)
        self.num_consumed = num_tokens

    def _mask(self) -> Mask:
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint8).copy()
        check(self.matcher)
        return self._finished(mask)

    def _finished(self, mask: np.ndarray) -> Mask:
        """Return llguidance's mask in the logits' size, with the tokens that end the output."""
        bits = mask[: self.num_bytes]
        if len(bits) < self.num_bytes:
            bits = np.pad(bits, (0, self.num_bytes - len(bits)))
        if self.matcher.is_accepting():
            bits |= self.stop_bits
        return bits.data
