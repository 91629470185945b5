"""The masks of requests with grammars, made by worker threads: the MaskSource of the engine."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np

from kiln.engine.errors import RequestError
from kiln.engine.grammar.constraint import Constraint
from kiln.engine.grammar.together import Together, Work
from kiln.engine.grammar.vocabulary import check, compiled
from kiln.engine.requests.finish import stop_token_ids
from kiln.engine.requests.late_masks import Mask, Wanted
from kiln.engine.requests.request import NewRequest, Request

_MAX_THREADS = 8
_LEAST_LIMIT = 0.002  # seconds for a mask, above which its request is slow
_MAX_KEPT = 256  # grammars that stay compiled
_MAX_PAUSE = 64
_WAIT = 0.1  # seconds

Read = Callable[[], Any]


class GrammarMasks:
    """Compiles the grammars of requests, and makes their masks while the forward pass runs.

    ``read`` returns llguidance's vocabulary, and is called when the first grammar needs it. Masks
    have one bit for each of ``vocab_size`` tokens. ``eos_token_ids`` end an output. With ``forces``
    the tokens that a grammar forces are found, to be drafts.

    A request whose last mask took long is slow: it runs only when its next mask is ready, so that
    the others never wait for it. A request that is not slow may miss a step, and the next ones
    until its mask is ready.
    """

    def __init__(
        self, read: Read, vocab_size: int, eos_token_ids: frozenset[int], *, forces: bool = False
    ) -> None:
        self._read = read
        self._num_bits = 32 * -(-vocab_size // 32)
        self._eos = eos_token_ids
        self._forces = forces
        self._constraints: dict[str, Constraint] = {}
        self._vocabulary: Future[Any] | None = None
        self._compiled: OrderedDict[str, Future[Any]] = OrderedDict()
        threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 2) - 1))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kiln-grammar")
        self._together = Together(self._known_vocabulary, threads)
        self._limit = _LEAST_LIMIT

    def check(self, new: NewRequest) -> None:
        """Compile the grammar of a request now. Raises RequestError."""
        if new.grammar is not None:
            self._compile(new.grammar).result()

    def close(self) -> None:
        """End the threads, but for one that is busy with a grammar."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, new: NewRequest) -> bool:
        """Begin to compile the grammar of a request, and to make its first mask."""
        if new.grammar is None:
            return False
        bits = np.zeros(self._num_bits, np.bool_)
        bits[list(stop_token_ids(new, self._eos))] = True
        stops = np.packbits(bits, bitorder="little")
        constraint = Constraint(len(stops), stops, wants_forced=self._forces)
        self._constraints[new.request_id] = constraint
        self._start([constraint], partial(_begin, constraint, self._compile(new.grammar)))
        return True

    def end(self, request_id: str) -> None:
        """Forget a request."""
        self._constraints.pop(request_id, None)

    def may_run(self, request: Request) -> bool:
        """Whether the next mask of a request is ready, or will surely be quick."""
        one = self._constraints[request.request_id]
        one.give_up()
        if one.error is not None:
            return True
        if one.is_busy:
            return False
        if not one.slow:
            return True
        if request.num_pending:
            return False
        if one.masks_behind(request.num_output_tokens, ()) is not None:
            return True
        work = Work(one, request.num_output_tokens, one.unread(request), ())
        self._start([one], partial(work.alone, self._limit))
        return False

    def wait(self) -> None:
        """Wait for a job, for a moment at most."""
        jobs = [one.job for one in self._constraints.values() if one.job and not one.job.done()]
        wait(jobs, _WAIT, FIRST_COMPLETED)

    def masks(
        self, wanted: Sequence[Wanted], patience: float
    ) -> Mapping[str, Sequence[Mask] | Exception]:
        """Return the masks that are made within ``patience`` seconds; see MaskSource."""
        self._limit = max(patience, _LEAST_LIMIT)
        deadline, jobs, quick = time.monotonic() + patience, set[Future[None]](), list[Work]()
        for request, drafts in wanted:
            one, count = self._constraints[request.request_id], request.num_output_tokens
            self._learn(one, request)
            if one.is_busy or one.error or one.masks_behind(count, drafts) is not None:
                continue
            work = Work(one, count, one.unread(request), drafts)
            if one.may_be_slow:
                jobs.add(self._start([one], partial(work.alone, self._limit)))
            else:
                quick.append(work)
        if quick:
            run = partial(self._together.make, quick, self._limit)
            jobs.add(self._start([work.constraint for work in quick], run))
        wait(jobs, max(deadline - time.monotonic(), 0))
        made: dict[str, Sequence[Mask] | Exception] = {}
        for request, drafts in wanted:
            one = self._constraints[request.request_id]
            masks = one.masks_behind(request.num_output_tokens, drafts)
            if one.error is not None:
                made[request.request_id] = one.error
            elif masks is not None:
                made[request.request_id] = masks
        return made

    def forced(self, request: Request, most: int) -> Sequence[int]:
        """Return the tokens that the grammar forces behind the last one; see MaskSource."""
        one, pending = self._constraints[request.request_id], request.num_pending
        if one.slow or one.is_busy or one.masks_behind(request.num_output_tokens, ()) is None:
            return ()
        first = max(pending - 1, 0)
        forced = one.forced[first : first + most + (pending > 0)]
        if len(forced) <= (pending > 0):
            return ()
        if not pending:
            return forced
        if one.pause:
            one.pause -= 1
            return ()
        one.guess = request.num_output_tokens + pending, forced[0]
        return forced

    def _learn(self, one: Constraint, request: Request) -> None:
        """Pause the guesses of a request if the last one was wrong."""
        if one.guess is None:
            return
        count, token = one.guess
        if request.num_output_tokens < count:
            return
        one.guess = None
        if request.token_ids[request.num_prompt_tokens + count - 1] == token:
            one.pauses = 1
        else:
            one.pause, one.pauses = one.pauses, min(2 * one.pauses, _MAX_PAUSE)

    def _start(self, constraints: Sequence[Constraint], work: Callable[[], None]) -> Future[None]:
        job, now = self._pool.submit(work), time.monotonic()
        for one in constraints:
            one.job, one.started = job, now
        return job

    def _known_vocabulary(self) -> Any:
        assert self._vocabulary is not None, "a grammar was compiled with it"
        return self._vocabulary.result()

    def _compile(self, text: str) -> Future[Any]:
        """Return a grammar at its start, compiled once for all requests that have it."""
        known = self._compiled.get(text)
        if known is None:
            if self._vocabulary is None:
                self._vocabulary = self._pool.submit(self._read)
            # The pool runs jobs in order, so the vocabulary is read or being read before this job.
            known = self._pool.submit(_compiled_behind, self._vocabulary, text)
            self._compiled[text] = known
            if len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(text)
        return known


def _compiled_behind(vocabulary: Future[Any], text: str) -> Any:
    matcher = compiled(vocabulary.result(), text)
    matcher.compute_bitmask()  # its copies know then what it has learnt
    check(matcher)
    return matcher


def _begin(one: Constraint, grammar: Future[Any]) -> None:
    """Give a request its own copy of a grammar, and make its first mask."""
    try:
        one.matcher = grammar.result().deep_copy()
    except Exception as error:
        one.error = error if isinstance(error, RequestError) else RequestError(repr(error))
        return
    one.make(0, [], (), _LEAST_LIMIT)
