"""The settings of a process that torchrun started."""

from __future__ import annotations

from dataclasses import replace

from kiln.engine.config import EngineConfig, ParallelConfig
from kiln.engine.distributed.launched import Launched, launched
from kiln.engine.errors import ConfigError


def with_torchrun(config: EngineConfig) -> tuple[EngineConfig, Launched | None]:
    """Return the settings with the ranks that torchrun started, and this process's place.

    None: torchrun did not start this process, or this one alone. Raises ConfigError if ``--tp``
    contradicts it.
    """
    place = launched()
    if place is None or place.world == 1:
        return config, None
    size = config.parallel.tensor_parallel_size
    if size not in (1, place.world):
        raise ConfigError(
            f"--tp {size}: torchrun has started {place.world} processes, one for each rank: leave "
            "the flag out, or start as many"
        )
    return replace(config, parallel=ParallelConfig(place.world, launcher="torchrun")), place
