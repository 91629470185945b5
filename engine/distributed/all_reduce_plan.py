"""What a group's all-reduce does for each message, and the buffers that this takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS, PUSHES, Algorithm, Layout
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig, default_modes

MAX_BYTES = 16 << 20  # of a message; beyond it bandwidth decides, and NCCL's is as good
_FUSED = 1 << 20  # not measured, as the blocks of a call
GPU_BLOCKS, HOST_BLOCKS = 64, 2
# By the number of ranks: measured on two H100s over NVLink, with the limits of ``default_modes``.
_MEASURED_FUSED = {2: 256 << 10}
_MEASURED_BLOCKS = {2: 128}


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


def gpu_blocks(world: int) -> int:
    """Return the blocks of a call on a GPU that has as many multiprocessors, by default."""
    return _MEASURED_BLOCKS.get(world, GPU_BLOCKS)


def default_plan(world: int, *, forced: str, blocks: int, modes: ModeConfig | None = None) -> Plan:
    """Return a plan for a group that was not measured. Raises ValueError on its size."""
    modes = modes or default_modes(world)
    fused = min(modes.one_shot_push_threshold, _MEASURED_FUSED.get(world, _FUSED))
    return Plan(modes, fused, max_blocks=blocks, forced=forced)
