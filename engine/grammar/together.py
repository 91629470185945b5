"""Masks of many requests, made by native threads in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kiln.engine.grammar.constraint import Constraint


class Work(NamedTuple):
    """A request's masks to be made; see ``Constraint.make``."""

    constraint: Constraint
    num_tokens: int
    unread: list[int]
    drafts: Sequence[int]

    @property
    def is_simple(self) -> bool:
        """Whether one new token and its mask are all there is to do."""
        one = self.constraint
        return len(self.unread) == 1 and one.num_consumed + 1 == self.num_tokens and not self.drafts

    def alone(self, limit: float) -> None:
        """Make them by themselves, and see how long it takes."""
        self.constraint.make(self.num_tokens, self.unread, self.drafts, limit)


class Together:
    """llguidance's own threads, which need no interpreter lock.

    ``vocabulary`` returns llguidance's LLTokenizer of the matchers.
    """

    def __init__(self, vocabulary: Callable[[], Any], num_threads: int) -> None:
        self._vocabulary = vocabulary
        self._num_threads = num_threads
        self._threads: Any = None

    def make(self, work: Sequence[Work], limit: float) -> None:
        """Make the masks of requests that each have one new token, and of others one by one.

        If all take more than ``limit`` seconds, each one is timed the next time.
        """
        began = time.monotonic()
        alike = [one for one in work if one.is_simple]
        others = [one for one in work if not one.is_simple]
        if alike:
            try:
                self._make_alike(alike)
            except Exception as error:
                for one in alike:
                    one.constraint.error = error
        for one in others:
            one.alone(limit)
        if time.monotonic() - began > limit:
            for one in alike:
                one.constraint.may_be_slow = True

    def _make_alike(self, work: Sequence[Work]) -> None:
        if self._threads is None:
            # Imported where it is used: most requests have no grammar.
            from llguidance import LLExecutor

            self._threads = LLExecutor(self._num_threads)
        matchers = [one.constraint.matcher for one in work]
        for one in work:  # a few microseconds each, less than threads need to begin
            one.constraint.matcher.consume_token(one.unread[0])
        num_bytes = 4 * -(-self._vocabulary().vocab_size // 32)
        masks = np.empty((len(work), num_bytes), np.uint8)
        places = list(zip(matchers, range(len(work)), strict=True))
        self._threads.unsafe_compute_mask_ptr(places, masks.ctypes.data, num_bytes, len(work))
        for one, mask in zip(work, masks, strict=True):
            one.constraint.take(one.num_tokens, mask)
