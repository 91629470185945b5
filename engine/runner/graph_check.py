"""Compare a decode graph with an eager step of the same size, on requests made up for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kiln.engine.graphs.runner import CudaGraphRunner
from kiln.engine.kv.pool import KVPool
from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.runner.forward import ModelStep

_CONTEXT = 17  # tokens of each request before the step: not a whole number of blocks
_PARAMS = SamplingParams(temperature=0.8, top_p=0.95)


class GraphCheck:
    """Steps of made-up requests in the first blocks of a pool that nobody uses yet.

    The block behind those of the requests is the canary: it holds NaN, the stale inputs of padding
    point to it, and no step may write to it.
    """

    def __init__(self, step: ModelStep, graphs: CudaGraphRunner, pool: KVPool) -> None:
        self._step, self._graphs, self._pool = step, graphs, pool
        self._blocks_each = -(-(_CONTEXT + 1) // pool.block_size)
        self._layers = sorted({0, len(step.layers) // 2, len(step.layers) - 1})
        self._prefilled = 0

    def difference(self, rows: int, used: int) -> str:
        """Return how the graph of a size differs from an eager step of ``used`` rows; "" if not.

        A pool too small for so many requests is tried with fewer.
        """
        used = min(used, self._pool.num_blocks // self._blocks_each - 1)
        if used < 1:
            return ""
        self._prefill(used)
        canary = used * self._blocks_each
        self._fill(canary, float("nan"))
        try:
            eager = self._run(rows, used, canary, lambda: self._step.decode(rows))
            first, again = (
                self._run(rows, used, canary, lambda: self._graphs.replay(rows)) for _ in range(2)
            )
            broken = not self._is_nan(canary)
        finally:
            self._fill(canary, 0.0)
        for name, a, b in zip(("logits", "tokens", "keys and values"), eager, first, strict=True):
            if not torch.equal(a, b):
                return f"its {name} differ from an eager step's"
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            return "two replays differ"
        return "padding wrote to a block of the KV pool" if broken else ""

    def _run(
        self, rows: int, used: int, canary: int, run: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Run a step behind stale inputs; return logits, tokens, and keys and values as bytes."""
        inputs = self._step.inputs
        inputs.send(Batch(tuple(self._row(index, 1) for index in range(used))))
        inputs.make_stale(rows, canary)
        logits = run()[:used].clone()
        kept = torch.stack([self._bytes(layer, 0, canary) for layer in self._layers])
        return logits, inputs.sampled[:used].clone(), kept

    def _prefill(self, used: int) -> None:
        """Compute the context of as many requests, a few at a time, as the token budget allows."""
        inputs = self._step.inputs
        together = max(1, inputs.max_tokens // _CONTEXT)
        count = min(_CONTEXT, inputs.max_tokens)
        for begin in range(self._prefilled, used, together):
            rows = range(begin, min(begin + together, used))
            batch = Batch(tuple(self._row(index, count) for index in rows))
            inputs.send(batch)
            self._step.hidden(inputs.make(batch))
        self._prefilled = max(self._prefilled, used)

    def _row(self, index: int, count: int) -> ScheduledRequest:
        """Return a request's first tokens, or the one behind them."""
        blocks = list(range(index * self._blocks_each, (index + 1) * self._blocks_each))
        decodes = count == 1
        size = self._step.vocab_size
        tokens = [(index * 37 + place * 11 + decodes) % size for place in range(count)]
        start = min(_CONTEXT, self._step.inputs.max_tokens) if decodes else 0
        return ScheduledRequest(
            f"check-{index}", index, count, start, tokens, 0, blocks, decodes, 0, _PARAMS, index
        )

    def _bytes(self, layer: int, first: int, last: int) -> torch.Tensor:
        keys, values = (part[first:last] for part in self._pool.views(layer))
        return torch.stack((keys, values)).view(torch.uint8)

    def _fill(self, block: int, number: float) -> None:
        for layer in range(len(self._step.layers)):
            for part in self._pool.views(layer):
                whole = torch.full(part[block].shape, number, device=part.device)
                part[block] = whole.to(part.dtype)

    def _is_nan(self, block: int) -> bool:
        parts = [part[block] for layer in self._layers for part in self._pool.views(layer)]
        return all(bool(part.float().isnan().all()) for part in parts)
