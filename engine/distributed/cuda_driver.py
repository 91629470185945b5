"""The calls of the CUDA driver that share memory between processes."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from kiln.engine.errors import ConfigError

IPC_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


class DriverError(ConfigError):
    """A call of the CUDA driver failed. ``name`` is the driver's name of the error."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call} failed: {name}")
        self.name = name


@cache
def bindings() -> Any:
    """Return cuda.bindings.driver. Raises ConfigError if it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(
            f"cuda-bindings cannot be loaded ({error}); pip install cuda-bindings"
        ) from None
    return driver


def driver_call(name: str, *arguments: Any) -> Any:
    """Return the result of a driver function, a tuple if it has several. Raises DriverError."""
    error, *results = getattr(bindings(), name)(*arguments)
    if error != 0:
        _, text = bindings().cuGetErrorName(error)
        raise DriverError(name, text.decode() if text else str(error))
    return results[0] if len(results) == 1 else tuple(results)


def export_ipc(address: int) -> bytes:
    """Return the IPC handle of an allocation. Raises DriverError."""
    handle = driver_call("cuIpcGetMemHandle", address)
    return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)


def open_ipc(handle: bytes) -> int:
    """Return the address in this process of another process' allocation. Raises DriverError."""
    own = bindings().CUipcMemHandle()
    ctypes.memmove(own.getPtr(), handle, IPC_HANDLE_BYTES)
    lazily = bindings().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(driver_call("cuIpcOpenMemHandle", own, int(lazily)))


def write(address: int, data: bytes) -> None:
    """Copy bytes to device memory, also of another GPU, and wait for it. Raises DriverError."""
    source = ctypes.create_string_buffer(data, len(data))
    driver_call("cuMemcpyHtoD", address, ctypes.addressof(source), len(data))
    driver_call("cuCtxSynchronize")


def read(address: int, num_bytes: int) -> bytes:
    """Copy bytes from device memory, also of another GPU. Raises DriverError."""
    found = ctypes.create_string_buffer(num_bytes)
    driver_call("cuMemcpyDtoH", ctypes.addressof(found), address, num_bytes)
    return found.raw


class RawMemory:
    """Device memory as ``torch.as_tensor`` takes it: [num_bytes] uint8."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None,
            "version": 3,
        }  # fmt: skip
