"""Decide what each step computes, within a token budget and a pool of KV blocks.

Prefill and decode are one mechanism: each step moves ``num_computed_tokens`` closer to the number
of tokens. A decode is one token behind; a chunked prefill is many tokens behind. A preempted
request starts again from 0, with its output so far treated as part of the prompt.

    running first      every running request computes at least one token in every step
    blocks run out     the newest running request is preempted
    admission          first come, first served, with the rest; never in a step that preempted

The first rule holds because a request is admitted only if the running ones leave budget over, and
because the most tokens that a request takes in a step never grows.
"""

from __future__ import annotations

import random
from collections import deque

from kiln.engine.config import SchedulerConfig
from kiln.engine.errors import QueueFullError, RequestError
from kiln.engine.kv.manager import KVManager
from kiln.engine.requests.batch import Batch, SampledToken, ScheduledRequest, StepOutput
from kiln.engine.requests.finish import banned_token_ids, finish_reason, stop_reason, stop_token_ids
from kiln.engine.requests.request import NewRequest, Request, TokenOutput

SEED_BITS = 53  # of a random seed: JSON readers represent it exactly


class Scheduler:
    """The requests in flight, and the choice of each step's batch.

    ``max_model_len`` is the context in tokens. The pool also limits it, because a request must be
    able to finish when it runs alone. ``seed`` generates the seeds of requests without one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
    ) -> None:
        self.config = config
        self.kv = kv
        self.eos_token_ids = eos_token_ids
        # The last output token is never computed, so it needs no slot.
        self.max_total_tokens = min(max_model_len, kv.capacity + 1)
        self.max_chunk_tokens = config.max_chunk_tokens or config.max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}
        self._in_flight: list[Request] = []  # the rows of the running batch
        self._seeds = random.Random(seed)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def check(self, new: NewRequest) -> None:
        """Reject a request that could never run. Raises RequestError."""
        if new.request_id in self._requests:
            raise RequestError(f"request id {new.request_id!r} is already in use", "request_id")
        prompt, kv = len(new.prompt_token_ids), self.kv
        if prompt > kv.capacity:
            raise RequestError(
                f"the prompt has {prompt} tokens, but the KV pool holds {kv.capacity} "
                f"({kv.pool.num_blocks} blocks of {kv.block_size}): shorten it, or serve with "
                "more blocks",
                "prompt",
            )

    def add(self, new: NewRequest) -> None:
        """Queue a request. Raises RequestError, or QueueFullError if the queue is full."""
        self.check(new)
        if len(self.waiting) >= self.config.max_waiting:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting, and the queue holds at most "
                f"{self.config.max_waiting}: try again later"
            )
        params, prompt = new.params, len(new.prompt_token_ids)
        total = self.max_total_tokens
        if params.max_tokens is not None:
            total = min(total, prompt + params.max_tokens)
        request = Request(
            request_id=new.request_id,
            token_ids=list(new.prompt_token_ids),
            num_prompt_tokens=prompt,
            params=params,
            seed=self._seeds.getrandbits(SEED_BITS) if params.seed is None else params.seed,
            max_total_tokens=total,
            stop_token_ids=stop_token_ids(params, self.eos_token_ids),
        )
        if params.penalizes:
            request.token_counts = dict.fromkeys(new.prompt_token_ids, 0)
        self._requests[new.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Drop a waiting or running request and free its blocks. An unknown id is ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def schedule(self) -> Batch:
        """Return the batch of the next step; empty if there is nothing to do."""
        self._in_flight = []
        rows: list[ScheduledRequest] = []
        budget = self.config.max_num_batched_tokens
        preemptions = self.num_preemptions
        index = 0
        while index < len(self.running):  # preemption shrinks it from the end
            row = self._advance(self.running[index], budget)
            if row is not None:
                budget -= len(row.token_ids)
                rows.append(row)
                index += 1
        if self.num_preemptions == preemptions:
            rows += self._admit(budget)
        return Batch(tuple(rows))

    def commit(self, batch: Batch, output: StepOutput) -> list[TokenOutput]:
        """Record the output of a step: append tokens, finish requests, free their blocks.

        A failed row ends its request, even in the middle of a chunked prefill. A request aborted
        since the batch was made is skipped.
        """
        sampled = {token.request_id: token for token in output.tokens}
        in_flight, self._in_flight = self._in_flight, []
        outputs = []
        for row, request in zip(batch.requests, in_flight, strict=True):
            if self._requests.get(row.request_id) is not request:
                continue
            token = sampled.get(row.request_id)
            if token is not None and token.error is not None:
                self._release(request)
                outputs.append(TokenOutput(row.request_id, [], "error", message=token.error))
                continue
            request.num_computed_tokens += len(row.token_ids)
            if row.samples:
                outputs.append(self._accept(request, sampled[row.request_id]))
        return outputs

    def _advance(self, request: Request, allowance: int) -> ScheduledRequest | None:
        """Schedule at most ``allowance`` tokens of a running request.

        Preempts the newest requests until one token fits. None if this request was preempted.
        """
        while (row := self._row(request, allowance)) is None:
            newest = self.running[-1]
            self._preempt(newest)
            if newest is request:
                return None
        return row

    def _admit(self, budget: int) -> list[ScheduledRequest]:
        """Start waiting requests in order, as long as budget, rows and blocks last."""
        rows: list[ScheduledRequest] = []
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            # All of its tokens must fit now, although only a chunk takes blocks, and each running
            # request keeps a spare block. Else it could be preempted before its first output token.
            if self.running and not self.kv.fits(len(request.token_ids), len(self.running)):
                break
            row = self._row(request, budget)
            assert row is not None, "at least one block is free: checked, or no request is running"
            budget -= len(row.token_ids)
            rows.append(row)
            self.running.append(self.waiting.popleft())
        return rows

    def _row(self, request: Request, allowance: int) -> ScheduledRequest | None:
        """Allocate a request's blocks and return its part of the step; None if no token fits."""
        start, length = request.num_computed_tokens, len(request.token_ids)
        wanted = min(length - start, allowance, self.max_chunk_tokens)
        count = min(wanted, self.kv.room(request) - start)
        if count <= 0 or not self.kv.extend(request, start + count):
            return None
        self._in_flight.append(request)
        return ScheduledRequest(
            request_id=request.request_id,
            token_ids=request.token_ids[start : start + count],
            num_computed_tokens=start,
            block_ids=request.block_ids,
            samples=start + count == length,
            num_output_tokens=length - request.num_prompt_tokens,
            params=request.params,
            seed=request.seed,
            banned_token_ids=banned_token_ids(request),
            token_counts=request.token_counts,
        )

    def _preempt(self, request: Request) -> None:
        """Free the blocks of the newest running request and move it to the head of the queue."""
        self.running.remove(request)
        self.kv.release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _accept(self, request: Request, sampled: SampledToken) -> TokenOutput:
        """Append a sampled token to its request; finish the request if it is the last one."""
        request.token_ids.append(sampled.token_id)
        if request.params.penalizes:
            counts, token = request.token_counts, sampled.token_id
            counts[token] = counts.get(token, 0) + 1
        reason = finish_reason(request)
        if reason is not None:
            self._release(request)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=[sampled.token_id],
            finish_reason=reason,
            stop_reason=stop_reason(request, self.eos_token_ids) if reason == "stop" else None,
            logprobs=None if sampled.logprobs is None else [sampled.logprobs],
            seed=request.seed if request.num_output_tokens == 1 else None,
        )

    def _release(self, request: Request) -> None:
        """Remove a finished request and free its blocks."""
        del self._requests[request.request_id]
        if request in self.running:
            self.running.remove(request)
        self.kv.release(request)
