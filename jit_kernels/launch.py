"""Cubins loaded once and launched on the current stream through the CUDA driver API.

Everything is loaded before the KV pool is sized and before any graph is captured: loading takes
device memory and is forbidden during capture. Handles live as long as the process.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch

from kiln.cache.root import cache_root
from kiln.cache.store import Store
from kiln.jit_kernels.arch import device_arch
from kiln.jit_kernels.compile.build import Built, build
from kiln.jit_kernels.errors import LaunchError, ToolchainMissing
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.spec import KernelSpec, LaunchGeometry, label

_SLOT = 8  # bytes of one packed argument
_FORMATS = {"pointer": "Q", "int64": "q", "int32": "i4x", "float": "f4x"}


class ArgumentBlock(threading.local):
    """A kernel's arguments, packed once into memory that the driver reads at each launch.

    One block a thread: the driver reads it with the GIL released.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._packer = struct.Struct("=" + "".join(_FORMATS[kind] for kind in arguments))
        self._values = ctypes.create_string_buffer(_SLOT * len(arguments))
        start = ctypes.addressof(self._values)
        slots = [start + _SLOT * index for index in range(len(arguments))]
        self._pointers = (ctypes.c_void_p * len(arguments))(*slots)
        self.address = ctypes.addressof(self._pointers)  # the void** that the driver wants

    def pack(self, values: Sequence[torch.Tensor | int | float]) -> int:
        """Store the values; return the address of the array of pointers to them."""
        plain = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
        self._packer.pack_into(self._values, 0, *plain)
        return self.address


class LoadedKernel:
    """A kernel on one device, ready to launch. ``function`` is the driver's CUfunction."""

    def __init__(self, name: str, function: Any, arguments: Sequence[str]) -> None:
        self.name = name
        self._function = function
        self._block = ArgumentBlock(arguments)

    def launch(
        self,
        driver: Any,
        geometry: LaunchGeometry,
        values: Sequence[torch.Tensor | int | float],
        stream: int,
    ) -> None:
        """Queue the kernel on a stream; nothing is queued for an empty grid. Raises LaunchError."""
        if 0 in geometry.grid:
            return
        address = self._block.pack(values)
        (error,) = driver.cuLaunchKernel(
            self._function, *geometry.grid, *geometry.block, geometry.shared_bytes, stream,
            address, 0,
        )  # fmt: skip
        if error != 0:
            raise LaunchError(f"{self.name}: launch of {geometry} failed: {_reason(driver, error)}")


def launch(spec: KernelSpec, arguments: Sequence[Any]) -> None:
    """Launch a spec's kernel on the operator's arguments, on the current stream of their device.

    Raises LaunchError when the kernel was not loaded or the driver refuses.
    """
    bound = spec.bind(*arguments)
    tensor = next(value for value in bound.values if isinstance(value, torch.Tensor))
    name = label(spec, bound.variant)
    kernel = _loaded(tensor.device.index).get(name)
    if kernel is None:
        raise LaunchError(f"{name} is not loaded on {tensor.device}; load_kernels comes first")
    geometry = spec.geometry(bound.variant, bound.sizes)
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    kernel.launch(_driver(), geometry, bound.values, stream)


def load_kernels(
    specs: Sequence[KernelSpec],
    device: torch.device,
    on_built: Callable[[str, Built], None] = lambda name, built: None,
) -> None:
    """Build (or find on disk) and load every variant of some specs on a CUDA device.

    Raises CompileError, LaunchError and ToolchainMissing.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    loaded, driver = _loaded(index), _driver()
    arch, store = target_arch(torch.device("cuda", index)), kernel_store()
    with torch.cuda.device(index):
        torch.cuda.synchronize()  # make torch's own context current before the driver loads
        for spec in specs:
            for variant in spec.variants():
                name = label(spec, variant)
                if name not in loaded:
                    built = build(spec, variant, arch, store)
                    function = _load(driver, name, built.cubin, spec.entry)
                    loaded[name] = LoadedKernel(name, function, spec.arguments)
                    on_built(name, built)


def target_arch(device: torch.device) -> str:
    """Return what to compile for: ``KILN_KERNEL_ARCH``, else what the device is."""
    return settings().kernel_arch or device_arch(device)


@cache
def kernel_store() -> Store:
    """Return the kernel cache of this process."""
    return Store(cache_root(settings()))


@cache
def _loaded(device_index: int) -> dict[str, LoadedKernel]:
    """Return the kernels loaded on a device, by label."""
    return {}


def _load(driver: Any, name: str, cubin: bytes, entry: str) -> Any:
    error, module = driver.cuModuleLoadData(cubin)
    if error != 0:
        raise LaunchError(f"{name}: the driver refused the cubin: {_reason(driver, error)}")
    error, function = driver.cuModuleGetFunction(module, entry.encode())
    if error != 0:
        raise LaunchError(f"{name}: no entry {entry!r} in the cubin: {_reason(driver, error)}")
    return function


@cache
def _driver() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ToolchainMissing(
            f"cuda-bindings cannot be loaded ({error}); pip install cuda-bindings"
        ) from None
    return driver  # type: ignore[no-any-return]


def _reason(driver: Any, error: Any) -> str:
    _, name = driver.cuGetErrorName(error)
    _, text = driver.cuGetErrorString(error)
    return f"{name.decode()} ({text.decode()})" if name and text else str(error)
