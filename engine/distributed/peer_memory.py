"""Memory of each rank's GPU that the GPUs of all ranks can access.

Two ways, tried in this order: cuMemAlloc and CUDA IPC handles; cuMemCreate and file descriptors,
where IPC is refused, as in some containers. Neither goes through torch's allocator, so that its
settings, such as expandable segments, do not matter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from kiln.engine.distributed import cuda_driver, descriptors
from kiln.engine.distributed.cuda_driver import DriverError, bindings, driver_call
from kiln.engine.distributed.peer_handshake import (
    PROBLEM,
    Exchange,
    problem_of_all,
    problems_of,
    tell_all,
)
from kiln.engine.errors import ConfigError

# Small allocations share 2 MiB pages, and an IPC handle opens a whole page to the peer.
_PAGE = 2 << 20


class PeerMemory:
    """Device memory of this rank, which its peers can access, and theirs.

    ``own`` [num_bytes] uint8; ``peers`` [world] int64 on the same device, the distance in bytes
    from ``own`` to each rank's buffer.

    Every rank must construct it at the same time. Raises ConfigError on every rank, with what each
    way failed at, if one of them cannot allocate, export or open.
    """

    def __init__(self, num_bytes: int, rank: int, exchange: Exchange, device: torch.device) -> None:
        size = -(-num_bytes // _PAGE) * _PAGE
        torch.cuda.synchronize(device)  # makes torch's context current
        problems = []
        mapping: IpcMapping | FileMapping
        for way in (IpcMapping, FileMapping):
            mapping = way(size)
            problem = _connect(mapping, rank, exchange)
            if not problem:
                break
            problems.append(f"{mapping.name}: {problem}")
            mapping.close_peers()
            mapping.close()
        else:
            raise ConfigError("the GPUs cannot share memory by " + "; by ".join(problems))
        self.way = mapping.name
        self._mapping = mapping
        begin = mapping.addresses[rank]
        raw = cuda_driver.RawMemory(begin, size)
        self.own = torch.as_tensor(raw, device=device)[:num_bytes]
        offsets = [mapping.addresses[other] - begin for other in sorted(mapping.addresses)]
        self.peers = torch.tensor(offsets, dtype=torch.int64, device=device)

    def close_peers(self) -> None:
        """Give back what belongs to other ranks. Nothing may use it any more."""
        self._mapping.close_peers()

    def close(self) -> None:
        """Free this rank's memory. No other rank may have it open."""
        self._mapping.close()


def _connect(mapping: Any, rank: int, exchange: Exchange) -> str:
    """Allocate, export and open on all ranks; return the problems of all, "" if there are none."""
    try:
        told = {"handle": mapping.export(rank)}
    except (ConfigError, OSError) as error:
        told = {PROBLEM: str(error)}
    all_told = tell_all(exchange, told)
    problem = problems_of(all_told)
    if problem:
        return problem
    try:
        mapping.open([one["handle"] for one in all_told], rank, exchange)
    except (ConfigError, OSError) as error:
        problem = str(error)
    return problem_of_all(exchange, problem)


class IpcMapping:
    """cuMemAlloc, and the handles of CUDA IPC."""

    name = "CUDA IPC"

    def __init__(self, size: int) -> None:
        self.addresses: dict[int, int] = {}  # by rank
        self._size = size
        self._own: int | None = None
        self._opened: list[int] = []

    def export(self, rank: int) -> str:
        """Allocate, and return what peers need to open it."""
        self._own = self.addresses[rank] = int(driver_call("cuMemAlloc", self._size))
        return cuda_driver.export_ipc(self._own).hex()

    def open(self, handles: Sequence[str], rank: int, exchange: Exchange) -> None:
        """Open the peers' memory."""
        for other, handle in enumerate(handles):
            if other != rank:
                self.addresses[other] = cuda_driver.open_ipc(bytes.fromhex(handle))
                self._opened.append(self.addresses[other])

    def close_peers(self) -> None:
        """Close what was opened."""
        while self._opened:
            driver_call("cuIpcCloseMemHandle", self._opened.pop())

    def close(self) -> None:
        """Free the own memory."""
        own, self._own = self._own, None
        if own is not None:
            driver_call("cuMemFree", own)


class FileMapping:
    """cuMemCreate, and file descriptors sent over Unix sockets."""

    name = "file descriptors"

    def __init__(self, size: int) -> None:
        self.addresses: dict[int, int] = {}  # by rank
        self._size = size
        self._device = -1
        self._kind = bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._descriptor = -1
        self._own: Any = None
        self._mapped: dict[int, Any] = {}  # address -> handle, of peers

    def export(self, rank: int) -> str:
        """Allocate. Peers get it in ``open``."""
        self._device = int(driver_call("cuCtxGetDevice"))
        properties = bindings().CUmemAllocationProp()
        properties.type = bindings().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._place()
        properties.requestedHandleTypes = self._kind
        least = bindings().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(driver_call("cuMemGetAllocationGranularity", properties, least))
        self._size = -(-self._size // step) * step
        handle = driver_call("cuMemCreate", self._size, properties, 0)
        self.addresses[rank] = self._map(handle)
        self._own = (self.addresses[rank], handle)
        self._descriptor = int(driver_call("cuMemExportToShareableHandle", handle, self._kind, 0))
        return ""

    def open(self, handles: Sequence[str], rank: int, exchange: Exchange) -> None:
        """Get the peers' descriptors and map their memory."""
        found = descriptors.share_descriptor(self._descriptor, rank, exchange)
        try:
            for other, descriptor in found.items():
                handle = driver_call("cuMemImportFromShareableHandle", descriptor, self._kind)
                self.addresses[other] = self._map(handle)
                self._mapped[self.addresses[other]] = handle
        finally:
            for descriptor in (*found.values(), self._descriptor):
                os.close(descriptor)
            self._descriptor = -1

    def close_peers(self) -> None:
        """Unmap what was opened."""
        while self._mapped:
            self._unmap(*self._mapped.popitem())

    def close(self) -> None:
        """Free the own memory."""
        own, self._own = self._own, None
        if own is not None:
            self._unmap(*own)
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def _place(self) -> Any:
        place = bindings().CUmemLocation()
        place.type = bindings().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = self._device
        return place

    def _map(self, handle: Any) -> int:
        """Return an address of the memory of a handle; frees the handle if that fails."""
        address = 0
        try:
            address = int(driver_call("cuMemAddressReserve", self._size, 0, 0, 0))
            driver_call("cuMemMap", address, self._size, 0, handle, 0)
        except DriverError:
            if address:
                driver_call("cuMemAddressFree", address, self._size)
            driver_call("cuMemRelease", handle)
            raise
        access = bindings().CUmemAccessDesc()
        access.location = self._place()
        access.flags = bindings().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            driver_call("cuMemSetAccess", address, self._size, [access], 1)
        except DriverError:
            self._unmap(address, handle)
            raise
        return address

    def _unmap(self, address: int, handle: Any) -> None:
        driver_call("cuMemUnmap", address, self._size)
        driver_call("cuMemAddressFree", address, self._size)
        driver_call("cuMemRelease", handle)
