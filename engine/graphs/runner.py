"""Whole steps as captured graphs of a few sizes, replayed instead of launched kernel by kernel."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from kiln.engine.graphs.counts import GraphCounts
from kiln.engine.graphs.device import Between, Graph, GraphDevice, frozen_garbage
from kiln.engine.requests.batch import Batch

_FEW_ROWS = 16  # where the choice of kernels matters most
_MARGIN = 0.03  # a smaller difference may be noise
_MEASURED = 8  # graphs: the driver allocates in large chunks

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # stage, done, total
Step = Callable[["GraphKey", Between], torch.Tensor]
"""Runs a step of a fixed size, padding included, on tensors whose addresses never change.

It returns the logits [samples, vocab_size]. What cannot be captured goes to ``between``.
"""


class GraphKey(NamedTuple):
    """The size that a graph was captured for. ``variant`` tells graphs of one size apart.

    With ``is_decode`` each of ``rows`` requests samples behind all of its tokens, of which there
    are at most ``tokens / rows``: one, and its drafts. Else ``tokens`` are spread over the requests
    in any way.
    """

    tokens: int
    rows: int
    is_decode: bool
    variant: str = ""

    @property
    def row_tokens(self) -> int:
        """The most tokens of a row of a decode step, else 0."""
        return self.tokens // self.rows if self.is_decode else 0

    @property
    def samples(self) -> int:
        """The tokens that are sampled: one for each row, and one for each draft."""
        return self.tokens if self.is_decode else self.rows

    def __str__(self) -> str:
        size = f"{self.rows}" if self.row_tokens == 1 else f"{self.tokens} tokens, {self.rows} rows"
        return f"{size}, {self.variant}" if self.variant else size


LORA = "LoRA"  # the variant of steps with adapters
VARIANTS = ("", LORA)


def decode_key(rows: int, drafts: int = 0) -> GraphKey:
    """Return the key of a decode step, with as many drafts for each row."""
    return GraphKey(rows * (1 + drafts), rows, is_decode=True)


class Captured(NamedTuple):
    """A graph and its logits [samples, vocab_size], which are valid until the next replay."""

    graph: Graph
    logits: torch.Tensor
    size: str


class Choice(NamedTuple):
    """The graph that a step runs in, and its size in words; or the reason why it runs in none."""

    key: GraphKey | None
    size: str = ""
    why_eager: str = ""


class CudaGraphRunner:
    """Whole steps, from the inputs to the sampled tokens, each captured for a size.

    ``addresses()`` returns the addresses of all inputs: no graph is replayed if they are not those
    of the capture. With ``strict`` a graph that cannot be captured is an error; else steps of its
    size run in a larger graph or without one. ``agree`` returns the least of all ranks' numbers.
    """

    def __init__(
        self,
        keys: Iterable[GraphKey],
        device: GraphDevice,
        addresses: Callable[[], tuple[int, ...]],
        *,
        garbage_collection: bool = False,
        strict: bool = False,
        agree: Callable[[Sequence[int]], list[int]] = list,
    ) -> None:
        self.keys = tuple(sorted(set(keys)))
        self.counts = GraphCounts()
        self._device = device
        self._addresses = addresses
        self._garbage_collection = garbage_collection
        self._strict = strict
        self._agree = agree
        self._captured: dict[GraphKey, Captured] = {}  # from the smallest on
        self._dropped: dict[GraphKey, str] = {}  # and why
        self._captured_addresses: tuple[int, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether the graphs are captured."""
        return bool(self._captured_addresses)

    def capture(self, step: Step, progress: Progress) -> None:
        """Capture a graph for every key, the largest first: its memory serves the smaller ones.

        Everything that a step runs must have been compiled and loaded before.
        """
        keys = self.keys
        with frozen_garbage(not self._garbage_collection):
            for done, key in enumerate(reversed(keys)):
                progress("CUDA graphs", done, len(keys))
                self._capture(step, key)
        progress("CUDA graphs", len(keys), len(keys))
        self._drop_slow()
        in_order = sorted(self._captured.items())
        self._captured.clear()
        self._captured.update(in_order)
        self._captured_addresses = self._addresses()

    def measure(self, step: Step, free_bytes: Callable[[], int]) -> int:
        """Return about how many bytes of device memory all graphs take; capture again afterwards.

        The largest ones are measured. The smaller ones reuse their memory, so that each takes about
        as much as those after the first: what the driver keeps of a graph.
        """
        keys = self.keys
        self._capture(step, keys[-1])  # libraries allocate their workspaces once
        self._discard()
        free = [free_bytes()]
        for key in keys[: -_MEASURED - 1 : -1]:
            self._capture(step, key)
            free.append(free_bytes())
        self._discard()
        first, others = max(free[0] - free[1], 0), max(free[1] - free[-1], 0)
        return first + others * (len(keys) - 1) // max(len(free) - 2, 1)

    def _drop_slow(self) -> None:
        """Drop each graph of few rows that is slower than one of more rows.

        Libraries choose the kernels of a matrix product by its number of rows, and those for very
        few rows can be the slower ones.
        """
        few = [key for key in self._captured if key.is_decode and key.rows <= _FEW_ROWS]
        least: dict[tuple[int, str], float] = {}
        for key in sorted(few, reverse=True):
            nanoseconds = int(self._device.milliseconds(self._captured[key].graph) * 1e6)
            time = -self._agree([-nanoseconds])[0]  # of the slowest rank, so that all drop the same
            kind = key.row_tokens, key.variant
            larger = least.get(kind, math.inf)
            if time > larger * (1 + _MARGIN):
                logger.info("the CUDA graph of %s is slower than a larger one: dropped", key)
                self._remove(key)
            least[kind] = min(larger, time)

    def _discard(self) -> None:
        self._captured.clear()
        self._device.renew_pool()

    def drop(self, key: GraphKey, reason: str) -> None:
        """Run steps of a size without a graph, or in a larger one, from now on."""
        logger.warning("the CUDA graph of %s is not used: %s", key, reason)
        self._remove(key)
        self._dropped[key] = f"{key}: {reason}"
        self.counts.fallbacks[self._dropped[key]] += 1

    def _remove(self, key: GraphKey) -> None:
        self._captured.pop(key, None)
        self.keys = tuple(own for own in self.keys if own != key)

    def free_later(self) -> Callable[[], None]:
        """Return a function that frees all graphs. It refers to the graphs alone.

        No step may run after it.
        """
        return self._captured.clear

    def choose(self, batch: Batch) -> Choice:
        """Return the graph that a batch runs in. If it runs in none, the reason is counted.

        Raises RuntimeError if the inputs' memory has moved.
        """
        if self._addresses() != self._captured_addresses:
            raise RuntimeError("the inputs of a CUDA graph have moved since it was captured")
        key = self._fit(batch, self._captured)
        if key is not None:
            return Choice(key, self._captured[key].size)
        if (dropped := self._fit(batch, sorted(self._dropped))) is not None:
            return self.refuse(self._dropped[dropped])
        many = "too many rows" if batch.is_decode else "a prefill of too many tokens or rows"
        return self.refuse(many)

    def refuse(self, reason: str) -> Choice:
        """Count a step that runs without a graph, and why."""
        self.counts.fallbacks[reason] += 1
        return Choice(None, why_eager=reason)

    def replay(self, key: GraphKey) -> torch.Tensor:
        """Run the graph of a size and return its logits [samples, vocab_size]."""
        captured = self._captured[key]
        captured.graph.replay()
        self.counts.replays[captured.size] += 1
        return captured.logits

    @staticmethod
    def _fit(batch: Batch, keys: Iterable[GraphKey]) -> GraphKey | None:
        """Return the first of some graphs, a few dozen, that a batch fits in."""
        rows, tokens = len(batch.requests), batch.num_tokens
        most, variant = batch.row_tokens, LORA if batch.has_adapters else ""
        if not most and batch.num_samples > rows:
            return None
        for key in keys:
            alike = key.row_tokens == most or key.row_tokens > most > 1
            if alike and key.variant == variant and key.tokens >= tokens and key.rows >= rows:
                return key
        return None

    def _capture(self, step: Step, key: GraphKey) -> None:
        logits: list[torch.Tensor] = []

        def run(between: Between) -> None:
            logits[:] = [self._device.keep(step(key, between))]

        try:
            graph = self._device.capture(run)
        except Exception as error:
            if self._strict:
                raise
            if not self._captured:
                self._device.renew_pool()  # the failed graph was the only one of its pool
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            self.drop(key, "out of memory" if out_of_memory else f"{error}".partition("\n")[0])
        else:
            self._captured[key] = Captured(graph, logits[0], str(key))
