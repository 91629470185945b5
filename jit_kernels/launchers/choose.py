"""Which launcher runs: the one that ``KILN_LAUNCHER`` names."""

from __future__ import annotations

from functools import cache

from kiln.jit_kernels.launchers.cuda_python import CudaPythonLauncher
from kiln.jit_kernels.launchers.cupy_module import CuPyLauncher
from kiln.jit_kernels.launchers.protocol import Launcher
from kiln.jit_kernels.settings import settings


@cache
def launcher() -> Launcher:
    """Return the launcher of this process. Raises ToolchainMissing."""
    return CuPyLauncher() if settings().launcher == "cupy" else CudaPythonLauncher()
