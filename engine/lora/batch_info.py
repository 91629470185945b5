"""Which tokens of a step belong to which adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kiln.jit_kernels.ops.lora.tiles import Tiles

NO_ADAPTER = -1


@dataclass(frozen=True, slots=True)
class LoRABatchInfo:
    """The segments of a step: runs of tokens with one adapter, or with none.

    ``starts``: the first token of each segment, and the number of tokens. ``adapters``: their
    adapter slots, -1 for none. ``pruned``: the segments of the tokens that need logits, which are
    the rows that the LM head sees; None in such an info itself. ``tiles``: the tokens as kernels
    read them, on the device, if the backend has kernels.
    """

    starts: tuple[int, ...]
    adapters: tuple[int, ...]
    pruned: LoRABatchInfo | None = None
    tiles: Tiles | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all segments."""
        return self.starts[-1]

    def adapted(self) -> Iterator[tuple[int, slice]]:
        """Yield adapter slot and tokens of each segment that has an adapter."""
        for index, slot in enumerate(self.adapters):
            if slot != NO_ADAPTER:
                yield slot, slice(self.starts[index], self.starts[index + 1])


def make_batch_info(
    slots: Sequence[int], lengths: Sequence[int], samples: Sequence[int]
) -> LoRABatchInfo:
    """Return the segments of a step.

    By request, in the order of their tokens: adapter slot or -1, number of tokens, and how many of
    the last ones need logits.
    """
    pruned = LoRABatchInfo(*_segments(slots, samples))
    return LoRABatchInfo(*_segments(slots, lengths), pruned)


def _segments(
    slots: Sequence[int], lengths: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return starts and adapters of the segments; neighbours of one adapter share a segment."""
    starts: list[int] = [0]
    adapters: list[int] = []
    for slot, length in zip(slots, lengths, strict=True):
        if not length:
            continue
        if adapters and adapters[-1] == slot:
            starts[-1] += length
        else:
            adapters.append(slot)
            starts.append(starts[-1] + length)
    return tuple(starts), tuple(adapters)
