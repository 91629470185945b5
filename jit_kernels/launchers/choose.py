"""Which launcher runs: the one that ``KILN_LAUNCHER`` names.

On an H200 CuPy takes 0.4 µs less of the 5.5 µs that a launch takes through cuda-python
(benchmarks/gpu_check.md). The default is cuda-python all the same: CuPy takes 70 ms more to import
and is one more library that must fit the driver, and a captured graph pays for neither.
"""

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
