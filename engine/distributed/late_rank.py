"""What a rank's kernels wrote down about ranks that did not come, as an error."""

from __future__ import annotations

from typing import Any

import torch

from kiln.engine.errors import CustomAllReduceTimeout
from kiln.jit_kernels.ops.all_reduce.record import (
    POISONED,
    RECORD_WORDS,
    STOP,
    late_ranks,
    poisoned_by,
)

_ADVICE = "that rank is stopped or frozen, or made another call; all ranks must be started again"


class LateRecord:
    """The record of a rank, in memory that kernels write and the host reads without waiting."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.tensor = torch.zeros(1, RECORD_WORDS, dtype=torch.int32, pin_memory=pinned)
        self._words: Any = self.tensor.numpy()[0]
        self._who = f"rank {rank} of {world}"

    def stop(self) -> None:
        """End the waits of kernels that run, from any thread: a rank will not come."""
        self._words[STOP] = 1

    def check(self) -> None:
        """Raise CustomAllReduceTimeout if a call of this rank, or of another, has timed out."""
        words = self._words
        if words[0]:
            [late] = late_ranks(self.tensor)
            raise CustomAllReduceTimeout(f"all-reduce: {late}: {_ADVICE}")
        if words[POISONED]:
            waited, missing = poisoned_by(int(words[POISONED]))
            raise CustomAllReduceTimeout(
                f"all-reduce: rank {waited} waited in vain for rank {missing}, so {self._who} does "
                f"not go on: {_ADVICE}"
            )
