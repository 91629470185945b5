"""Which tokens of a step belong to which adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import torch

from kiln.jit_kernels.ops.lora.tiles import Tiles

NO_ADAPTER = -1


@dataclass(frozen=True, slots=True)
class LoRABatchInfo:
    """The segments of a step: runs of tokens with one adapter, or with none.

    segment_starts: [num_segments + 1] int32, the first token of each, and the number of tokens;
    segment_adapter: [num_segments] int32, adapter slots, -1 for none. ``starts`` and ``adapters``
    are the same on the host. ``pruned``: the segments of the tokens that need logits, which are the
    rows that the LM head sees; None in such an info itself. ``tiles``: the same tokens as kernels
    read them, if the backend has kernels.
    """

    segment_starts: torch.Tensor
    segment_adapter: torch.Tensor
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
    slots: Sequence[int], lengths: Sequence[int], samples: Sequence[bool], device: torch.device
) -> LoRABatchInfo:
    """Return the segments of a step, sent to the device in one copy.

    By request, in the order of their tokens: adapter slot or -1, number of tokens, and whether its
    last token needs logits.
    """
    host = [_segments(slots, lengths)]
    if set(lengths) != {1} or not all(samples):
        sampling = list(compress(slots, samples))
        host.append(_segments(sampling, [1] * len(sampling)))
    numbers = [number for starts, adapters in host for number in (*starts, *adapters)]
    packed = torch.tensor(numbers, dtype=torch.int32)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    sizes = [len(part) for starts, adapters in host for part in (starts, adapters)]
    tensors = packed.split(sizes)
    pruned = LoRABatchInfo(tensors[-2], tensors[-1], *host[-1])
    return LoRABatchInfo(tensors[0], tensors[1], *host[0], pruned)


def _segments(
    slots: Sequence[int], lengths: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return starts and adapters of the segments; neighbours of one adapter share a segment."""
    starts: list[int] = [0]
    adapters: list[int] = []
    for slot, length in zip(slots, lengths, strict=True):
        if adapters and adapters[-1] == slot:
            starts[-1] += length
        else:
            adapters.append(slot)
            starts.append(starts[-1] + length)
    return tuple(starts), tuple(adapters)
