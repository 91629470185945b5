"""Decide what each step computes, within a token budget and a pool of KV blocks.

Prefill and decode are one mechanism: each step moves ``num_computed_tokens`` closer to the number
of tokens. A decode is one token behind; a chunked prefill is many tokens behind. A preempted
request starts again from 0, with its output so far treated as part of the prompt.

A step may be scheduled before the tokens of the step ahead of it are known: requests advance when
they are scheduled, and ``commit`` appends the tokens when they arrive. A request is not scheduled
again if a launched step will sample the last token that its length limit allows. A request that
ends by a stop token has a superfluous row in the next step, which ``commit`` discards. Drafts
advance a request as if all were accepted, and ``commit`` takes back those that were not.

    running first      every running request computes at least one token in every step
    blocks run out     the last of the running requests is preempted
    admission          in the order of the policy, with the rest; never in a step that preempted
    LoRA adapters      a request whose adapter has no slot is passed over, for a bounded time
    grammars           a request is passed over, running or not, while its mask is being made
    prefix caching     blocks that others have computed count as computed; passed over are requests
                       most of whose prompt a running one computes, or the host tier copies

``requests.waiting`` keeps waiting and running requests in the order of the policy. The first rule
holds because a request is admitted only if the running ones leave some budget, and each of these
leaves a token to every one behind it. A running request keeps its adapter's slot: no adapter is
evicted that a running request or a launched step uses.

Every request is admitted at last: finitely many overtake it, and the first that is not passed over
waits only for what the running ones return, of which the first is never preempted. AdapterSlots and
HostTier show that none is passed over for ever.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from operator import itemgetter

from kiln.engine.config import SchedulerConfig
from kiln.engine.errors import RequestError
from kiln.engine.kv.manager import KVManager
from kiln.engine.lora.slots import AdapterSlots
from kiln.engine.requests.batch import Batch, SampledTokens, ScheduledRequest, StepOutput
from kiln.engine.requests.begin import begin_request
from kiln.engine.requests.drafts import NO_DRAFT, Drafter, computes_prompts, drafts_of
from kiln.engine.requests.finish import embedding_output, finish_reason, note_reports, stop_reason
from kiln.engine.requests.late_masks import MaskSource
from kiln.engine.requests.prefix import PrefixState
from kiln.engine.requests.request import NewRequest, Request, TokenOutput
from kiln.engine.requests.scheduled_step import ScheduledStep, ScheduledSteps
from kiln.engine.requests.waiting import check_room, waiting_queue

SEED_BITS = 53  # of a random seed: JSON readers represent it exactly
_NO_TOKENS: frozenset[int] = frozenset()
# Like ScheduledRequest(*values), in a third of the time.
_new_row = partial(tuple.__new__, ScheduledRequest)
_new_output = partial(tuple.__new__, TokenOutput)
_request_id = itemgetter(SampledTokens._fields.index("request_id"))


class Scheduler:
    """The requests in flight, and the choice of each step's batch.

    ``max_model_len`` is the context in tokens. The pool also limits it, because a request must be
    able to finish when it runs alone. ``adapters`` are the LoRA adapters; ``seed`` generates the
    seeds of requests without one, None draws it from the system's randomness. ``masks`` makes the
    masks of late requests. ``long_start``: see ``begin_request``. ``drafter`` proposes drafts;
    None: there are none. ``steps`` are those in flight.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        adapters: AdapterSlots | None = None,
        seed: int | None = None,
        masks: MaskSource | None = None,
        long_start: int = 0,
    ) -> None:
        self.steps, self.config, self.kv = ScheduledSteps(), config, kv
        self.drafter: Drafter | None = None  # set by the caller
        self.masks = masks
        self.eos_token_ids, self.long_start = eos_token_ids, long_start
        self.adapters = AdapterSlots() if adapters is None else adapters
        self.adapters.in_flight = self.steps.adapter_slots
        # The last output token is never computed, so it needs no slot.
        self.max_total_tokens = min(max_model_len, kv.capacity + 1)
        self.max_chunk_tokens = config.max_chunk_tokens or config.budget
        self.waiting = waiting_queue(config.scheduling_policy)
        self.running: list[Request] = []  # the last one is preempted first
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}
        self._free_rows = list(range(config.num_rows))[::-1]
        self._seeds = random.Random(seed)

    @property
    def requests(self) -> Mapping[str, Request]:
        """The requests that wait or run, by id."""
        return self._requests

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def check(self, new: NewRequest) -> None:
        """Reject a request that could never run. Raises RequestError."""
        if new.request_id in self._requests:
            raise RequestError(f"request id {new.request_id!r} is already in use", "request_id")
        self.waiting.check(new)
        if new.adapter is not None:
            self.adapters.get(new.adapter)
        self.kv.check(len(new.prompt_token_ids))

    def add(self, new: NewRequest, *, is_late: bool = False) -> None:
        """Queue a request. Raises RequestError, or QueueFullError if the queue is full."""
        self.check(new)
        check_room(self.waiting, self.config.max_waiting)
        seed = self._seeds.getrandbits(SEED_BITS) if new.params.seed is None else new.params.seed
        limits = (self.max_total_tokens, self.eos_token_ids, self.long_start)
        request = begin_request(new, seed, *limits, is_late=is_late)
        load = 0 if new.adapter is None else self.adapters.hold(new.adapter)
        request.prefix = PrefixState((load, new.cache_salt, request.rotary_start))
        self._requests[new.request_id] = request
        self.waiting.add(request)

    def abort(self, request_id: str) -> None:
        """Drop a waiting or running request and free its blocks. An unknown id is ignored."""
        if (request := self._requests.get(request_id)) is not None:
            self._release(request)

    def clear(self) -> None:
        """Drop every request, free its blocks, and forget the launched steps."""
        for request_id in tuple(self._requests):
            self.abort(request_id)
        self.steps.clear()

    def rebuild(self) -> None:
        """Make all state anew from the requests, after an exception at any line of this class.

        Every request waits again, and the launched steps are forgotten. Tokens whose output was
        lost stay, but for the last one of a request: it ends the request once more.
        """
        self.steps.clear()
        self.kv.clear()
        self._free_rows = list(range(self.config.num_rows))[::-1]
        self.waiting.rebuild(self._requests.values())
        self.running = []
        for request in self.waiting:
            if request.num_output_tokens and finish_reason(request):
                del request.token_ids[-1]
            request.restart()
        self.adapters.rebuild(one.adapter for one in self.waiting if one.adapter is not None)

    def schedule(self) -> Batch:
        """Return the batch of the next step; empty if there is nothing to do."""
        requests: list[Request] = []
        rows: list[ScheduledRequest] = []
        running, preemptions = self.running, self.num_preemptions
        budget = self.config.budget - len(running)  # less a token for each of them
        if self.drafter is not None:
            with_prompts = bool(self.waiting) or computes_prompts(running)
            self.drafter.begin(len(running), with_prompts=with_prompts)
        index = 0
        while index < len(running):  # preemption shrinks it from the end
            request = running[index]
            budget += 1
            if self._may_run(request):
                row = self._row(request, budget) or self._advance(request, budget)
                if row is None:
                    break
                budget -= row.num_tokens
                rows.append(row)
                requests.append(request)
            index += 1
        if self.num_preemptions == preemptions:
            self._admit(budget, requests, rows)
        batch = Batch(tuple(rows), 0 if self.drafter is None else self.drafter.wanted)
        if rows:
            self.steps.append(ScheduledStep(batch, [*requests]))
        return batch

    def commit(self, batch: Batch, output: StepOutput) -> list[TokenOutput]:
        """Record the output of a step: append tokens, finish requests, free their blocks.

        Steps are committed in the order in which they were scheduled; skipped steps are dropped. A
        failed row ends its request, even in the middle of a chunked prefill. A row whose request
        has ended since the batch was made is skipped.
        """
        sampled = dict(zip(map(_request_id, output.tokens), output.tokens, strict=True))
        outputs, reports = list[TokenOutput](), batch.reports
        for row, request in zip(batch.requests, self.steps.end(batch), strict=True):
            request_id = row.request_id
            if request is None or self._requests.get(request_id) is not request:
                continue
            request.num_pending -= row.num_samples
            tokens = sampled.get(request_id)
            if reports and tokens is not None:
                note_reports(request, row, tokens)
            if tokens is not None and tokens.error is not None:
                self._release(request)
                outputs.append(TokenOutput(request_id, [], "error", message=tokens.error))
            elif tokens is not None and tokens.token_ids:
                if request.row == row.row:  # else it was preempted: all is computed again
                    request.num_computed_tokens -= row.num_samples - len(tokens.token_ids)
                outputs.append(self._accept(request, tokens))
            elif row.num_samples and request.num_computed_tokens:
                # The step has failed for this row: its last token is computed again.
                request.num_computed_tokens = len(request.token_ids) - 1
            elif (end := row.num_computed_tokens + row.num_tokens) >= request.prefix.index_at:
                self.kv.index(request, end)
            if reports and (embedded := embedding_output(request)) is not None:
                self._release(request)
                outputs.append(embedded)
        if self.drafter is not None and batch.has_drafts:
            self.drafter.observe(batch, sampled)
        return outputs

    def _advance(self, request: Request, allowance: int) -> ScheduledRequest | None:
        """Schedule at most ``allowance`` tokens of a running request.

        Preempts running requests, from the last one on, until there is room for a token. Returns
        None if that reaches this request, which then waits too.
        """
        while (row := self._row(request, allowance)) is None:
            if self._preempt() is request:
                return None
        return row

    def _admit(self, budget: int, requests: list[Request], rows: list[ScheduledRequest]) -> None:
        """Start waiting requests in order, as long as budget, rows and blocks last."""
        self.adapters.begin_pass()
        for request in tuple(self.waiting):
            if budget <= 0 or not self._free_rows:
                break
            if request.is_late and not self._may_run(request):
                continue
            if request.adapter is not None:
                slot = self.adapters.slot_for(request.adapter)
                if slot is None:
                    continue
                request.adapter_slot = slot
            prefix = self.kv.prefix(request, spare := len(self.running))
            if prefix is None:
                continue
            # All of its tokens must fit now, although only a chunk takes blocks, and each running
            # request keeps a spare block. Else it could be preempted before its first output token.
            if (spare or self.kv.is_loading) and not self.kv.fits(request, prefix, spare):
                break
            is_first = request.begin(self._free_rows.pop())
            self.kv.begin(request, prefix, is_first=is_first)
            row = self._row(request, budget)
            assert row is not None, "at least one block is free: checked, or no request is running"
            budget -= row.num_tokens
            rows.append(row)
            requests.append(request)
            self.waiting.start(request, self.running)
            if request.adapter is not None:
                self.adapters.start(request.adapter)
        self.adapters.end_pass(in_order=self.waiting.by_priority)

    def _row(self, request: Request, allowance: int) -> ScheduledRequest | None:
        """Allocate a request's blocks and return its part of the step; None if no token fits."""
        start, known = request.num_computed_tokens, request.token_ids
        blocks, num_blocks = request.block_ids, request.num_table_blocks
        length = len(known) + request.num_pending
        count, draft = length - start, NO_DRAFT
        if count > 1:
            count = min(count, allowance, self.max_chunk_tokens)
        elif self.drafter is not None:
            draft = drafts_of(request, self.drafter, self.masks, allowance - 1)
            count += draft.num_tokens
        if start + count > len(blocks) * self.kv.block_size:
            count = min(count, self.kv.room(request) - start)
            if count <= 0 or not self.kv.extend(request, start + count):
                return None
        samples = max(start + count - length + 1, 0) if length < request.max_total_tokens else 0
        bans = length < request.min_total_tokens
        request.num_computed_tokens = start + count
        request.num_table_blocks = len(blocks)
        request.num_pending += samples
        tokens = known[start : start + count]
        if draft.token_ids:
            tokens += draft.token_ids[: count - len(tokens)]
        return _new_row((
            request.request_id, request.row, count, start, tokens, num_blocks, blocks[num_blocks:],
            samples, length - request.num_prompt_tokens, request.params, request.seed,
            request.stop_token_ids if bans else _NO_TOKENS, request.is_plain and not bans,
            request.adapter_slot, request.rotary_start, request.prompt_part(start, count),
            request.pooled and request.pooled.part(start, count), request.is_late,
        ))  # fmt: skip

    def _may_run(self, request: Request) -> bool:
        """Whether launched steps leave a request anything to do, and its mask is ready."""
        known, pending = len(request.token_ids), request.num_pending
        if known + pending >= request.max_total_tokens and request.num_computed_tokens >= known:
            return False
        return not request.is_late or self.masks is None or self.masks.may_run(request)

    def _preempt(self) -> Request:
        """Free the blocks of the last running request, let it wait again, and return it."""
        request = self.running.pop()
        self._free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(request)
        return request

    def _accept(self, request: Request, sampled: SampledTokens) -> TokenOutput:
        """Append sampled tokens to their request; finish the request at its last one."""
        before, tokens = len(request.token_ids), sampled.token_ids
        once = request.told_once
        reason = stopped_by = None
        for token in tokens:
            request.token_ids.append(token)
            reason = finish_reason(request)
            if reason is not None:
                tokens = request.token_ids[before:]
                break
        if len(request.token_ids) > request.prefix.index_at:  # the last one is not computed yet
            self.kv.index(request, len(request.token_ids) - 1)
        if reason is not None:
            if reason == "stop":
                stopped_by = stop_reason(request, self.eos_token_ids)
            self._release(request)
        if request.adapter is not None:
            self.adapters.count(request.adapter, len(tokens))
        logprobs = None if sampled.logprobs is None else sampled.logprobs[: len(tokens)]
        return _new_output((request.request_id, tokens, reason, stopped_by, logprobs, None, *once))

    def _release(self, request: Request) -> None:
        """Remove a finished request and free its blocks."""
        del self._requests[request.request_id]
        (self.running if request.row >= 0 else self.waiting).remove(request)
        self._free(request)
        if request.adapter is not None:
            self.adapters.drop(request.adapter)

    def _free(self, request: Request) -> None:
        """Free the blocks and the row of a request. Steps in flight end before they are reused."""
        self.kv.release(request)
        if request.row >= 0:
            self._free_rows.append(request.row)
            request.row, request.num_table_blocks = -1, 0
            if request.adapter is not None:
                self.adapters.stop(request.adapter)
