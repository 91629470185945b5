"""Which launcher runs: the one that ``KILN_LAUNCHER`` names, else the fastest that is installed.

On an H200 a launch through CuPy takes 0.5 to 0.8 µs less of 5 µs than one through cuda-python
(benchmarks/gpu_check.md), so CuPy comes first where it can be imported.
"""

from __future__ import annotations

import logging
from functools import cache

from kiln.jit_kernels.errors import ToolchainMissing
from kiln.jit_kernels.launchers.cuda_python import CudaPythonLauncher
from kiln.jit_kernels.launchers.cupy_module import CuPyLauncher
from kiln.jit_kernels.launchers.protocol import Launcher
from kiln.jit_kernels.settings import settings

log = logging.getLogger(__name__)


@cache
def launcher() -> Launcher:
    """Return the launcher of this process. Raises ToolchainMissing."""
    toggle = settings().launcher
    if toggle == "cuda-python":
        return CudaPythonLauncher()
    try:
        return CuPyLauncher()
    except ToolchainMissing as error:
        if toggle == "cupy":
            raise
        log.info("kernels are launched through cuda-python: %s", error)
        return CudaPythonLauncher()
