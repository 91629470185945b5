"""Memory of GPUs among processes, with a driver that only keeps count of what is open."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kiln.engine.distributed import cuda_driver, peer_conditions, peer_memory
from kiln.engine.distributed.cuda_driver import DriverError
from kiln.engine.distributed.peer_memory import FileMapping, IpcMapping, _connect


class FakeDriver:
    """The calls of one process; ``refuses`` are calls that fail."""

    def __init__(self, refuses=()):
        self.open, self.refuses, self.next = set(), refuses, 1 << 32

    def __call__(self, name, *arguments):
        if name in self.refuses:
            raise DriverError(name, "CUDA_ERROR_NOT_SUPPORTED")
        return getattr(self, name)(*arguments)

    def new(self, kind):
        self.next += 1 << 32
        self.open.add((kind, self.next))
        return self.next

    def cuMemAlloc(self, size):
        return self.new("memory")

    def cuMemFree(self, address):
        self.open.remove(("memory", address))

    def cuIpcCloseMemHandle(self, address):
        self.open.remove(("opened", address))

    def cuCtxGetDevice(self):
        return 0

    def cuMemGetAllocationGranularity(self, properties, kind):
        assert int(properties.requestedHandleTypes) == 1
        return 4096

    def cuMemCreate(self, size, properties, flags):
        assert size % 4096 == 0
        return self.new("handle")

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        return os.open("/dev/null", os.O_RDONLY)

    def cuMemImportFromShareableHandle(self, descriptor, kind):
        os.fstat(descriptor)
        return self.new("handle")

    def cuMemAddressReserve(self, *arguments):
        return self.new("range")

    def cuMemMap(self, address, size, offset, handle, flags):
        self.open.add(("map", address))

    def cuMemSetAccess(self, address, size, access, count):
        assert access[0].location.id == 0

    def cuMemUnmap(self, address, size):
        self.open.remove(("map", address))

    def cuMemAddressFree(self, address, size):
        self.open.remove(("range", address))

    def cuMemRelease(self, handle):
        self.open.remove(("handle", handle))


class Ranks:
    """Ranks as threads, each with a driver of its own."""

    def __init__(self, monkeypatch, refuses):
        self.drivers = [FakeDriver(one) for one in refuses]
        self.here = threading.local()
        self.barrier = threading.Barrier(len(refuses), timeout=120)
        self.sent = [b""] * len(refuses)
        call = lambda name, *arguments: self.here.driver(name, *arguments)  # noqa: E731
        monkeypatch.setattr(peer_memory, "driver_call", call)
        monkeypatch.setattr(cuda_driver, "driver_call", call)
        monkeypatch.setattr(cuda_driver, "export_ipc", lambda address: self.ipc("export", address))
        monkeypatch.setattr(cuda_driver, "open_ipc", lambda handle: self.ipc("open", handle))

    def ipc(self, what, given):
        driver = self.here.driver
        if what in driver.refuses:
            raise DriverError(f"cuIpc {what}", "CUDA_ERROR_INVALID_CONTEXT")
        return bytes(64) if what == "export" else driver.new("opened")

    def exchange(self, rank):
        def exchange(sent):
            self.barrier.wait()
            self.sent[rank] = sent
            self.barrier.wait()
            received = list(self.sent)
            self.barrier.wait()
            return received

        return exchange

    def run(self, way):
        def one(rank):
            self.here.driver = self.drivers[rank]
            mapping = way(8192)
            problem = _connect(mapping, rank, self.exchange(rank))
            addresses = dict(mapping.addresses)
            mapping.close_peers()
            mapping.close()
            return problem, addresses

        with ThreadPoolExecutor(len(self.drivers)) as pool:
            return list(pool.map(one, range(len(self.drivers))))


@pytest.mark.parametrize("way", [IpcMapping, FileMapping])
def test_every_rank_has_the_memory_of_all_and_nothing_stays_open(monkeypatch, way):
    gc.collect()  # what earlier tests left open
    descriptors = set(os.listdir("/proc/self/fd"))
    ranks = Ranks(monkeypatch, [(), (), ()])
    for problem, addresses in ranks.run(way):
        assert problem == ""
        assert sorted(addresses) == [0, 1, 2]
        assert len({*addresses.values()}) == 3
    assert not any(driver.open for driver in ranks.drivers)
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


@pytest.mark.parametrize(
    ("way", "refused"),
    [
        (IpcMapping, "cuMemAlloc"), (IpcMapping, "export"), (IpcMapping, "open"),
        (FileMapping, "cuMemCreate"), (FileMapping, "cuMemExportToShareableHandle"),
        (FileMapping, "cuMemImportFromShareableHandle"), (FileMapping, "cuMemMap"),
        (FileMapping, "cuMemSetAccess"),
    ],
)  # fmt: skip
def test_what_fails_on_one_rank_is_told_by_all_and_freed(monkeypatch, way, refused):
    ranks = Ranks(monkeypatch, [(), (refused,)])
    told = {problem for problem, _ in ranks.run(way)}
    assert len(told) == 1
    assert told.pop().startswith("rank 1: cu")
    assert not any(driver.open for driver in ranks.drivers)


PLACES = [{"machine": "m", "pci": f"0000:0{number}:00.0"} for number in range(3)]


class FakeGpus:
    """GPUs of a machine, of which some pairs have a link."""

    def __init__(self, access=True, nvlink=(), hidden=()):
        self.access, self.nvlink, self.hidden = access, nvlink, hidden

    def __call__(self, name, *arguments):
        if name == "cuDeviceGetByPCIBusId":
            if arguments[0].decode() in self.hidden:
                raise DriverError(name, "CUDA_ERROR_INVALID_DEVICE")
            return int(arguments[0][6:7])
        if name == "cuDeviceCanAccessPeer":
            return self.access
        assert name == "cuDeviceGetP2PAttribute"
        return tuple(sorted(arguments[1:])) in self.nvlink


ALL = ((0, 1), (0, 2), (1, 2))


@pytest.mark.parametrize(
    ("gpus", "world", "pcie", "fabric", "reason"),
    [
        (FakeGpus(nvlink=ALL), 3, False, "NVLink", ""),
        (FakeGpus(), 2, False, "PCIe", ""),
        (FakeGpus(nvlink=ALL[:1]), 3, True, "PCIe", ""),
        (FakeGpus(nvlink=ALL[:1]), 3, False, "", "0000:02:00.0, and 3 ranks need it"),
        (FakeGpus(access=False), 2, True, "", "has no access to 0000:01:00.0 (rank 1)"),
        (FakeGpus(hidden=["0000:01:00.0"]), 2, True, "", "does not see the GPU 0000:01:00.0"),
    ],
)
def test_the_conditions_of_peer_access(monkeypatch, gpus, world, pcie, fabric, reason):
    monkeypatch.setattr(peer_conditions, "driver_call", gpus)
    found = peer_conditions.fabric_of(PLACES[:world], 0, allow_pcie=pcie)
    assert found[0] == fabric
    assert reason in found[1]
    assert bool(reason) == bool(found[1])


def test_ranks_of_several_machines_and_of_one_gpu():
    other = {**PLACES[1], "machine": "n"}
    assert (
        "several machines" in peer_conditions.fabric_of([PLACES[0], other], 0, allow_pcie=True)[1]
    )
    assert peer_conditions.fabric_of([PLACES[0]] * 2, 1, allow_pcie=False) == ("one GPU", "")
