"""Load cubins through CuPy's module API and launch kernels with arguments packed by Kiln."""

from __future__ import annotations

from typing import Any

from kiln.jit_kernels.declare.errors import LaunchError, ToolchainMissing
from kiln.jit_kernels.declare.spec import LaunchGeometry

_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CuPyLauncher:
    """Calls cupy.cuda; creates no CuPy array and uses none of CuPy's caches.

    CuPy does not support launch attributes, so no kernel is launched early.
    """

    name = "cupy"

    def __init__(self, cuda: Any = None) -> None:
        """Use ``cuda``, by default cupy.cuda. Raises ToolchainMissing."""
        cuda = _cupy_cuda() if cuda is None else cuda
        self._new_module = cuda.function.Module
        self._queue = cuda.driver.launchKernel
        self._queue_together = cuda.driver.launchCooperativeKernel
        self._set_attribute = cuda.driver.funcSetAttribute
        # CuPy raises the second kind if it cannot load the driver.
        self._errors = (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError)

    def load(
        self, name: str, cubin: bytes, entry: str, shared_bytes: int = 0, *, early_hint: str = ""
    ) -> Any:
        """Return the cupy.cuda.function.Function of an entry. Raises LaunchError."""
        module = self._new_module()
        try:
            module.load(cubin)
        except self._errors as error:
            raise LaunchError(f"{name}: the driver refused the cubin: {error}") from None
        try:
            function = module.get_function(entry)  # a reference to it keeps the module loaded
        except self._errors as error:
            raise LaunchError(f"{name}: no entry {entry!r} in the cubin: {error}") from None
        if shared_bytes:
            try:
                self._set_attribute(function.ptr, _MOST_SHARED, shared_bytes)
            except self._errors as error:
                raise LaunchError(
                    f"{name}: a block cannot have {shared_bytes} bytes of shared memory: {error}"
                ) from None
        return function

    def launch(
        self, name: str, function: Any, geometry: LaunchGeometry, arguments: int, stream: int
    ) -> None:
        """Queue a kernel. Raises LaunchError."""
        shape = (*geometry.grid, *geometry.block, geometry.shared_bytes)
        try:
            if geometry.cooperative:
                self._queue_together(function.ptr, *shape, stream, arguments)
            else:
                self._queue(function.ptr, *shape, stream, arguments, 0)
        except self._errors as error:
            raise LaunchError(f"{name}: launch of {geometry} failed: {error}") from None

    def at_graph_edge(self, stream: int) -> None:
        """Do nothing: no kernel is launched early."""


def _cupy_cuda() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ToolchainMissing(
            f"CuPy cannot be loaded ({error}); pip install cupy-cuda13x, or unset KILN_LAUNCHER"
        ) from None
    return cupy.cuda
