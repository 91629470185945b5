"""What a group's all-reduce does for each message, and the buffers that this takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS, PUSHES, Algorithm, Layout
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig, seed_modes

MAX_BYTES = 16 << 20  # of a message; beyond it bandwidth decides, and NCCL's is as good
_FUSED_SEED = 1 << 20
GPU_BLOCKS, HOST_BLOCKS = 64, 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Choices of a group, the same on all its ranks. Sizes in bytes.

    ``modes`` chooses the algorithm. ``fused_threshold``: the largest message that one kernel sums,
    adds and normalises. ``max_bytes``: the largest message of any kernel; torch sums larger ones.
    0: torch sums all messages, because it was always faster. ``max_blocks``: blocks of a call.
    ``forced``: an algorithm for all messages, without the fused kernel; "auto": none.
    """

    modes: ModeConfig
    fused_threshold: int
    max_bytes: int = MAX_BYTES
    max_blocks: int = GPU_BLOCKS
    forced: str = "auto"

    def algorithm_for(self, num_bytes: int) -> Algorithm | None:
        """Return the algorithm for a message; None: torch's."""
        if num_bytes > self.max_bytes:
            return None
        for algorithm in ALGORITHMS:
            if algorithm == self.forced:
                return algorithm
        return self.modes.choose(num_bytes)

    def fuses(self, num_bytes: int) -> bool:
        """Whether the fused kernel takes a message, in whole vectors a row."""
        return self.forced == "auto" and num_bytes <= min(self.fused_threshold, self.max_bytes)

    def layout(self, world: int) -> Layout:
        """Return buffers that hold the largest message of each algorithm in use."""
        return Layout(world, self.max_blocks, max(1, self._largest(True)), self._largest(False))

    def _largest(self, push: bool) -> int:
        if self.forced != "auto":
            return self.max_bytes if (self.forced in PUSHES) is push else 1
        limits = self.modes.limits()
        pushes = max(limits[algorithm] for algorithm in PUSHES)
        most = max(pushes, self.fused_threshold) if push else self.max_bytes
        return min(most, self.max_bytes)

    def fields(self) -> dict[str, Any]:
        """Return what all ranks must have alike, by name."""
        whole = asdict(self)
        return {**whole.pop("modes"), **whole}


def seed_plan(world: int, *, forced: str, blocks: int, modes: ModeConfig | None = None) -> Plan:
    """Return a plan that was not measured. Raises ValueError on a wrong number of ranks."""
    modes = modes or seed_modes(world)
    fused = min(modes.one_shot_push_threshold, _FUSED_SEED)
    return Plan(modes, fused, max_blocks=blocks, forced=forced)
