"""Which algorithm sums a message over the ranks, by its size. The bits do not depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from kiln.jit_kernels.ops.all_reduce.layout import MAX_WORLD, MIN_WORLD, Algorithm

_KB, _MB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class ModeConfig:
    """Limits of message sizes in bytes, tried in this order; beyond all of them: two_shot.

    A message of up to ``one_shot_push_threshold`` bytes is summed by one_shot_push, and so on. 0,
    or a limit that is not above the one before, means that the algorithm is not used. ``measured``:
    the limits come from measurements on this hardware, and are not defaults. Raises ValueError.
    """

    one_shot_push_threshold: int
    two_shot_push_threshold: int = 0
    one_shot_pull_threshold: int = 0
    measured: bool = False

    def __post_init__(self) -> None:
        for name, limit in self.limits().items():
            if limit < 0:
                raise ValueError(f"ModeConfig: {name}_threshold is {limit}, want 0 or more")

    def limits(self) -> dict[Algorithm, int]:
        """Return the limit of each algorithm that has one, in the order in which they are tried."""
        return {
            "one_shot_push": self.one_shot_push_threshold,
            "two_shot_push": self.two_shot_push_threshold,
            "one_shot_pull": self.one_shot_pull_threshold,
        }

    def choose(self, num_bytes: int) -> Algorithm:
        """Return the algorithm for a message of ``num_bytes``."""
        for algorithm, limit in self.limits().items():
            if num_bytes <= limit:
                return algorithm
        return "two_shot"


_DEFAULTS = {
    # Measured on two H100s over NVLink: tuned_plan of benchmarks/gpu_check_2gpus.md.
    2: ModeConfig(4 * _MB, 16 * _MB),
    # Not measured with these kernels: what SGLang tuned on an H200 for CUDA graphs
    # (python/sglang/srt/distributed/device_communicators/configs/custom_all_reduce_v2.py, 0.5.23).
    3: ModeConfig(1280 * _KB),
    4: ModeConfig(384 * _KB),
    5: ModeConfig(192 * _KB),
    6: ModeConfig(128 * _KB),
    7: ModeConfig(128 * _KB),
    8: ModeConfig(128 * _KB),
}


def default_modes(world: int) -> ModeConfig:
    """Return limits for a group that was not measured itself. Raises ValueError on its size."""
    if world not in _DEFAULTS:
        raise ValueError(f"an all-reduce of {world} ranks: want {MIN_WORLD} to {MAX_WORLD}")
    return _DEFAULTS[world]
