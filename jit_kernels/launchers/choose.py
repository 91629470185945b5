"""Which launcher runs: the one that ``KILN_LAUNCHER`` names, else the better of those installed.

From sm_90 on that is cuda-python: a kernel that it launches may come to the GPU before the one
ahead has ended, which saves half a microsecond of each. On older GPUs it is CuPy, where it can be
imported: its launches take less time of the CPU (benchmarks/gpu_check.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

from kiln.jit_kernels.errors import ToolchainMissing
from kiln.jit_kernels.launchers.cuda_python import CudaPythonLauncher
from kiln.jit_kernels.launchers.cupy_module import CuPyLauncher
from kiln.jit_kernels.launchers.protocol import Launcher
from kiln.jit_kernels.settings import settings

EARLY_ARCH = 90  # compute capability from which a kernel can be launched early
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
