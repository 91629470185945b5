"""Choose the launcher: the one that ``KILN_LAUNCHER`` names, else the better installed one.

From sm_90 on, cuda-python is better: it supports programmatic dependent launch, which saves half a
microsecond per kernel. On older GPUs CuPy is better: its launches take less CPU time
(benchmarks/gpu_check.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

from kiln.jit_kernels.declare.errors import ToolchainMissing
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.launchers.cuda_python import CudaPythonLauncher
from kiln.jit_kernels.launchers.cupy_module import CuPyLauncher
from kiln.jit_kernels.launchers.protocol import Launcher

EARLY_ARCH = 90  # lowest compute capability with programmatic dependent launch
_LAUNCHERS: dict[str, Callable[[], Launcher]] = {
    "cuda-python": CudaPythonLauncher,
    "cupy": CuPyLauncher,
}
log = logging.getLogger(__name__)


@cache
def launcher() -> Launcher:
    """Return the launcher of this process. Raises ToolchainMissing."""
    toggle = settings().launcher
    if toggle != "auto":
        return _LAUNCHERS[toggle]()
    better, other = "cupy", "cuda-python"
    if _has_early_launches():
        better, other = other, better
    try:
        return _LAUNCHERS[better]()
    except ToolchainMissing as error:
        log.info("kernels are launched through %s: %s", other, error)
        return _LAUNCHERS[other]()


def _has_early_launches() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (EARLY_ARCH // 10, 0)
