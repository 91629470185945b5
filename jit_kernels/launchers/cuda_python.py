"""The CUDA driver through cuda-python's bindings."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from kiln.jit_kernels.declare.errors import LaunchError, ToolchainMissing
from kiln.jit_kernels.declare.spec import LaunchGeometry

_WRITES_PLAN, _READS_PLAN = "pdl_writes_plan", "pdl_reads_plan"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A CUfunction and its early-launch hint; "" means that it must not be launched early.

    ``planned``: the streams of its context whose latest launch writes a plan, or may do so.
    """

    function: Any
    early_hint: str
    planned: set[int]

    def may_start_early(self, stream: int) -> bool:
        """Record that it is launched next on a stream; return whether it may be launched early.

        A kernel that reads a plan before it waits must not start early directly after the kernel
        that writes the plan. The plan is visible only after that kernel has ended, or after a
        kernel between the two has waited for it.
        """
        if self.early_hint == _WRITES_PLAN:
            self.planned.add(stream)
        elif stream in self.planned:
            self.planned.discard(stream)
            return self.early_hint not in ("", _READS_PLAN)
        return self.early_hint != ""


class _Configs(threading.local):
    """A thread's CUlaunchConfigs: for early launches, and for cooperative ones.

    They are reused, because creating one takes microseconds. Each launch sets the fields that
    change. A cooperative launch is not early: the driver need not support both.
    """

    def __init__(self, driver: Any) -> None:
        kinds = driver.CUlaunchAttributeID
        early, cooperative = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
        early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        cooperative.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        self.early, self.cooperative = driver.CUlaunchConfig(), driver.CUlaunchConfig()
        self.early.attrs, self.early.numAttrs = [early], 1
        self.cooperative.attrs, self.cooperative.numAttrs = [cooperative], 1


class CudaPythonLauncher:
    """Calls of cuda.bindings.driver."""

    name = "cuda-python"

    def __init__(self, driver: Any = None) -> None:
        """Use ``driver``, by default the real one. Raises ToolchainMissing."""
        self._driver = _bindings() if driver is None else driver
        self._queue, self._queue_with = self._driver.cuLaunchKernel, self._driver.cuLaunchKernelEx
        self._configs = _Configs(self._driver)
        self._planned: dict[int, set[int]] = {}  # streams, by context
        attribute = self._driver.CUfunction_attribute
        self._most_shared = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

    def load(
        self, name: str, cubin: bytes, entry: str, shared_bytes: int = 0, *, early_hint: str = ""
    ) -> Loaded:
        """Return the kernel of an entry. Raises LaunchError."""
        error, module = self._driver.cuModuleLoadData(cubin)
        if error != 0:
            raise LaunchError(f"{name}: the driver refused the cubin: {self._reason(error)}")
        error, function = self._driver.cuModuleGetFunction(module, entry.encode())
        if error != 0:
            raise LaunchError(f"{name}: no entry {entry!r} in the cubin: {self._reason(error)}")
        if shared_bytes:
            (error,) = self._driver.cuFuncSetAttribute(function, self._most_shared, shared_bytes)
            if error != 0:
                raise LaunchError(
                    f"{name}: a block cannot have {shared_bytes} bytes of shared memory: "
                    f"{self._reason(error)}"
                )
        error, context = self._driver.cuCtxGetCurrent()
        if error != 0:
            raise LaunchError(f"{name}: there is no current CUDA context: {self._reason(error)}")
        return Loaded(function, early_hint, self._planned.setdefault(int(context), set()))

    def launch(
        self, name: str, function: Loaded, geometry: LaunchGeometry, arguments: int, stream: int
    ) -> None:
        """Queue a kernel. Raises LaunchError."""
        early = function.may_start_early(stream)
        if early or geometry.cooperative:
            config = self._configs.cooperative if geometry.cooperative else self._configs.early
            config.gridDimX, config.gridDimY, config.gridDimZ = geometry.grid
            config.blockDimX, config.blockDimY, config.blockDimZ = geometry.block
            config.sharedMemBytes, config.hStream = geometry.shared_bytes, stream
            (error,) = self._queue_with(config, function.function, arguments, 0)
        else:
            (error,) = self._queue(
                function.function, *geometry.grid, *geometry.block, geometry.shared_bytes, stream,
                arguments, 0,
            )  # fmt: skip
        if error != 0:
            raise LaunchError(f"{name}: launch of {geometry} failed: {self._reason(error)}")

    def at_graph_edge(self, stream: int) -> None:
        """Assume that the latest launch on a stream writes a plan: a graph's launches are unseen.

        So no kernel that reads a plan before it waits starts early across the edge.
        """
        for planned in self._planned.values():
            planned.add(stream)

    def _reason(self, error: Any) -> str:
        _, name = self._driver.cuGetErrorName(error)
        _, text = self._driver.cuGetErrorString(error)
        return f"{name.decode()} ({text.decode()})" if name and text else str(error)


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ToolchainMissing(
            f"cuda-bindings cannot be loaded ({error}); pip install cuda-bindings"
        ) from None
    return driver
