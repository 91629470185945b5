"""What sums the ranks' partial results: Kiln's kernels where they work, else torch."""

from __future__ import annotations

import logging

import torch

from kiln.engine.distributed.custom_all_reduce import CustomAllReduceV2
from kiln.engine.distributed.group import Group
from kiln.jit_kernels.ops.all_reduce.members import WATCHDOG_MS

FAMILY = "all_reduce"
# While they load, one rank may compile for long what another has found in a cache.
_LOADING_MS = 600_000
# On a CPU kernels are compiled when they first run, also while serving.
_SERVING_MS = {"cuda": WATCHDOG_MS, "cpu": 60_000}

logger = logging.getLogger(__name__)


def patience_ms(device: torch.device) -> int:
    """Return how long a rank that is loaded waits for another one in a sum, in milliseconds."""
    return _SERVING_MS[device.type]


def sum_by_kernels(group: Group, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Let kernels sum over a group of several ranks where they can; return what runs, and why.

    Takes device memory, so it comes before the KV pool is sized. Raises ConfigError and
    KernelError.
    """
    if group.size == 1:
        return {}
    kernels = CustomAllReduceV2(group, device, dtypes=(dtype,))
    backend = "NCCL" if device.type == "cuda" else "gloo"
    if kernels.disabled:
        if group.rank == 0:
            logger.info("%s sums over the ranks: %s", backend, kernels.disabled_reason)
        return {FAMILY: f"torch, by {backend}: {kernels.disabled_reason}"}
    kernels.set_patience(_LOADING_MS)
    group.use_kernels(kernels)
    how = "jit" if device.type == "cuda" else "host"
    source = "limits measured here" if kernels.plan.modes.measured else "default limits"
    forced = kernels.plan.forced
    chosen = source if forced == "auto" else f"KILN_ALL_REDUCE_ALGORITHM={forced}"
    return {FAMILY: f"{how}: access over {kernels.fabric} is proven; {chosen}"}
