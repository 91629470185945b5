"""Compare a step's graph with an eager step of the same size, on requests made up for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from kiln.engine.graphs.runner import GraphKey
from kiln.engine.kv.pool import KVPool
from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.runner.executor import Executor

RunStep = Callable[[GraphKey, Batch], torch.Tensor]  # of the message that was sent last
_CONTEXT = 17  # most tokens of a request before the step: not a whole number of blocks
_PARAMS = SamplingParams(temperature=0.8, top_p=0.95)


class GraphCheck:
    """Steps of made-up requests in the first blocks of a pool that nobody uses yet.

    The block behind those of the requests is the canary: it holds NaN, the stale inputs of padding
    point to it, and no step may write to it.
    """

    def __init__(self, executor: Executor, pool: KVPool, adapter_slots: Sequence[int] = ()) -> None:
        self._executor, self._step, self._pool = executor, executor.step, pool
        self._slots = adapter_slots  # in turn, for the requests of graphs with adapters
        step = self._step
        drafts = step.inputs.drafts.shape[1]
        longest = step.inputs.max_model_len - 1 - drafts
        self._context = min(_CONTEXT, longest, step.inputs.max_tokens)
        self._blocks_each = -(-(self._context + 1 + drafts) // pool.block_size)
        self._layers = sorted({0, len(step.layers) // 2, len(step.layers) - 1})
        self._prefilled = 0

    def difference(self, key: GraphKey, tokens: int) -> str:
        """Return how a graph differs from an eager step of so many tokens; "" if it does not.

        A decode graph is tried with as many requests, another one with a prompt and requests that
        decode. A pool too small for so many is tried with fewer.
        """
        executor, requests = self._executor, self._requests(key, tokens)
        if not requests:
            return ""
        decoding = sum(request.num_computed_tokens > 0 for request in requests)
        canary = decoding * self._blocks_each + sum(len(one.new_block_ids) for one in requests)
        self._prefill(decoding)
        if key.variant:
            turns = zip(requests, cycle(self._slots), strict=False)
            requests = [request._replace(adapter_slot=slot) for request, slot in turns]
        before = [part[:canary].clone() for part in self._parts()]

        def run(step: RunStep) -> tuple[torch.Tensor, ...]:
            for part, own in zip(self._parts(), before, strict=True):
                part[:canary] = own
            return self._run(key, Batch(tuple(requests)), canary, step)

        self._fill(canary, float("nan"))
        try:
            eager, first, again = (
                run(step) for step in (executor.without_graph, executor.replay, executor.replay)
            )
            broken = not all(part[canary].float().isnan().all() for part in self._parts())
        finally:
            self._fill(canary, 0.0)
        self._prefilled = decoding  # a prompt takes the row and the blocks of the next one
        for name, a, b in zip(("logits", "tokens", "keys and values"), eager, first, strict=True):
            if not torch.equal(a, b):
                return f"its {name} differ from an eager step's"
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            return "two replays differ"
        if bool((eager[1] < 0).any()):  # the step behind reads them there
            return "its tokens are not in the fixed results"
        return "padding wrote to a block of the KV pool" if broken else ""

    def _requests(self, key: GraphKey, tokens: int) -> list[ScheduledRequest]:
        """Return requests that decode and, unless all of a graph's do, a prompt behind them."""
        size, free = self._pool.block_size, self._pool.num_blocks - 1  # one is the canary
        if key.is_decode:
            count = min(tokens, free // self._blocks_each)
            return [self._next(index, key.row_tokens) for index in range(count)]
        count = min(key.rows - 1, tokens // 2)
        prompt = min(tokens - count, self._step.inputs.max_model_len, free * size)
        if prompt < 1:  # the pool has one block
            return []
        count = min(count, (free - -(-prompt // size)) // self._blocks_each)
        return [*(self._next(index) for index in range(count)), self._prompt(count, prompt)]

    def _run(
        self, key: GraphKey, batch: Batch, canary: int, step: RunStep
    ) -> tuple[torch.Tensor, ...]:
        """Run a step behind stale inputs; return logits, tokens, and keys and values as bytes.

        The tokens are those sampled, and how many drafts of each row are rejected.
        """
        inputs, used = self._step.inputs, batch.num_samples
        inputs.send(batch)
        inputs.make_stale(key.tokens, key.rows, key.samples, canary)
        logits = step(key, batch)[:used].clone()
        kept = [part[:canary].reshape(-1).view(torch.uint8) for part in self._parts()]
        tokens = torch.cat([inputs.sampled[:used], inputs.rejected])
        return logits, tokens, torch.stack(kept)

    def _prefill(self, used: int) -> None:
        """Compute the context of as many requests, a few at a time, as the token budget allows."""
        inputs = self._step.inputs
        together = max(1, inputs.max_tokens // self._context)
        for begin in range(self._prefilled, used, together):
            rows = range(begin, min(begin + together, used))
            batch = Batch(tuple(self._first(index) for index in rows))
            inputs.send(batch)
            self._step.hidden(inputs.make(batch))
        self._prefilled = max(self._prefilled, used)

    def _first(self, index: int) -> ScheduledRequest:
        """Return the context of a request that decodes, with all the blocks that it needs."""
        first = index * self._blocks_each
        blocks = range(first, first + self._blocks_each)
        return self._scheduled(index, self._context, 0, blocks)

    def _next(self, index: int, count: int = 1) -> ScheduledRequest:
        """Return the tokens behind the context, as of a request whose row has its blocks."""
        request = self._scheduled(index, count, self._context, range(0), self._blocks_each)
        return request._replace(num_samples=count)

    def _prompt(self, index: int, count: int) -> ScheduledRequest:
        """Return a prompt that begins behind the blocks of the requests before it."""
        first = index * self._blocks_each
        blocks = range(first, first + -(-count // self._pool.block_size))
        return self._scheduled(index, count, 0, blocks)

    def _scheduled(
        self, index: int, count: int, start: int, new: range, old: int = 0
    ) -> ScheduledRequest:
        vocab = self._step.vocab_size
        tokens = [(index * 37 + place * 11 + (start > 0)) % vocab for place in range(count)]
        return ScheduledRequest(
            f"check-{index}", index, count, start, tokens, old, list(new), 1, 0, _PARAMS, index
        )

    def _parts(self) -> list[torch.Tensor]:
        """Return the keys and the values of the layers that are compared."""
        return [part for layer in self._layers for part in self._pool.views(layer)]

    def _fill(self, block: int, number: float) -> None:
        for layer in range(len(self._step.layers)):
            for part in self._pool.views(layer):
                whole = torch.full(part[block].shape, number, device=part.device)
                part[block] = whole.to(part.dtype)
