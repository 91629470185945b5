"""Launches on the host runtime: a world of ranks that runs to completion or to a report."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from kiln.jit_kernels.declare.errors import HostFault, LaunchError
from kiln.jit_kernels.declare.packing import ArgumentBlock
from kiln.jit_kernels.declare.parameters import KernelValue
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.toolchains.host_report import readable
from kiln.jit_kernels.toolchains.host_runtime import Runtime

_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_THREADS = 1024
_MAX_TOTAL = 2**31  # threads per launch; more would take hours on a CPU
_MAX_SHARED = 227 * 1024  # shared memory per block on Hopper, the maximum of all GPUs
_CPU_SECONDS, _REAL_SECONDS = 20.0, 600.0  # far more than a kernel's own limit on waiting
_MAX_ROWS = 4096  # a view of more rows is one allowed range, including the gaps


@dataclass(frozen=True, slots=True, eq=False)
class HostKernel:
    """A kernel compiled for the CPU. ``checked``: it reports its memory accesses."""

    name: str
    entry: int  # address of its thunk, void(void**)
    c_types: tuple[str, ...]
    checked: bool
    runtime: Runtime
    cluster: tuple[int, int] = (1, 1)  # blocks of a thread block cluster, in x and y


@dataclass(frozen=True, slots=True)
class _Launch:
    rank: int
    kernel: HostKernel
    geometry: LaunchGeometry
    block: ArgumentBlock
    address: int
    values: tuple[KernelValue, ...]  # kept alive until the run
    overlaps: bool


class World:
    """One stream per rank: the launches of a rank run in order, ranks interleave freely.

    Scheduler seed 0 is round-robin; any other seed is another, reproducible interleaving. A checked
    run reports data races, misaligned vectors, reads of uninitialised shared memory, and accesses
    outside the launches' tensors and those that ``allow`` adds. ``resident``: blocks of a rank that
    run concurrently; of a cooperative launch all do. ``seconds``: the limit of CPU time of a run,
    20 by default. The clock that kernels read is another one: it advances only while all threads
    wait.

    ``processes``: the one rank of this world waits for ranks in other processes, through memory
    that they share. Then waiting threads let other processes run, and are no deadlock; all blocks
    run concurrently; kernels read the real time, and ``seconds`` limits that, by default to 600. A
    run cannot be repeated, nor can it be checked, as the checker sees only one process.
    """

    def __init__(
        self,
        ranks: int = 1,
        *,
        seed: int = 0,
        checked: bool = False,
        resident: int | None = None,
        seconds: float | None = None,
        processes: bool = False,
    ) -> None:
        if processes and ranks != 1:
            raise ValueError(f"a world of {ranks} ranks among processes: each process runs one")
        if processes and checked:
            raise LaunchError(
                "a kernel that waits for ranks in other processes cannot be checked, because the "
                "checker sees only what this process does: set KILN_CPU_KERNELS=host, or "
                "KILN_ALL_REDUCE=torch"
            )
        self.ranks, self.seed, self.checked, self.processes = ranks, seed, checked, processes
        default = _REAL_SECONDS if processes else _CPU_SECONDS
        self.seconds = default if seconds is None else seconds
        # One block at a time is fastest; errors between blocks need several concurrent blocks.
        alone = ranks == 1 and seed == 0
        self.resident = resident or (1 if alone else 64 if ranks > 1 else 4)
        self._launches: list[_Launch] = []
        self._allowed: list[torch.Tensor] = []

    def allow(self, tensor: torch.Tensor) -> None:
        """Let kernels access a tensor that is not an argument, such as a peer's buffer."""
        self._allowed.append(tensor)

    def enqueue(
        self,
        rank: int,
        kernel: HostKernel,
        geometry: LaunchGeometry,
        values: Sequence[KernelValue],
        *,
        overlaps: bool = False,
    ) -> None:
        """Queue a launch on a rank. An empty grid queues nothing.

        ``overlaps``: a programmatic dependent launch. The previous launch happens before a thread
        of this one only after that thread's wait. The runtime still runs the two in order, but a
        checked run reports accesses before the wait as races.

        Raises LaunchError for a geometry that no GPU supports. Raises ValueError for an unknown
        rank, a tensor that is not on the CPU, and a plain kernel in a checked world.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of {self.ranks}: ranks count from 0")
        if self.checked and not kernel.checked:
            raise ValueError(f"{kernel.name} was built without checks: load it with checked=True")
        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                raise ValueError(f"{kernel.name} runs on the CPU; a tensor is on {value.device}")
        _check_geometry(kernel, geometry)
        if 0 in geometry.grid:
            return
        block = ArgumentBlock(kernel.c_types)
        address = block.pack(values)
        self._launches.append(
            _Launch(rank, kernel, geometry, block, address, tuple(values), overlaps)
        )

    def run(self) -> int:
        """Run the queued launches; return the number of thread switches.

        Raises HostFault with all reports, and LaunchError for too much shared memory.
        """
        if not self._launches:
            return 0
        runtime = self._launches[0].kernel.runtime
        with runtime.lock:
            runtime.begin(
                self.ranks, self.seed, self.resident, self.checked, self.processes, self.seconds
            )
            if self.checked:
                for begin, end in self._regions():
                    runtime.region(begin, end - begin)
            for launch in self._launches:
                self._enqueue(runtime, launch)
            failed = runtime.run()
            switches = int(runtime.switches())
            report = runtime.report().decode() if failed else ""
        names = ", ".join(dict.fromkeys(launch.kernel.name for launch in self._launches))
        self._launches.clear()
        if failed:
            raise HostFault(f"{names} with seed {self.seed}: {readable(report).strip()}")
        return switches

    def _regions(self) -> list[tuple[int, int]]:
        """Return the allowed ranges [begin, end) in ascending order, overlaps merged."""
        values = [value for launch in self._launches for value in launch.values]
        tensors = [value for value in (*values, *self._allowed) if isinstance(value, torch.Tensor)]
        regions: list[tuple[int, int]] = []
        for begin, end in sorted(region for tensor in tensors for region in touchable(tensor)):
            if regions and begin < regions[-1][1]:
                regions[-1] = (regions[-1][0], max(regions[-1][1], end))
            else:
                regions.append((begin, end))
        return regions

    def _enqueue(self, runtime: Runtime, launch: _Launch) -> None:
        geometry, dims = launch.geometry, ctypes.c_uint * 3
        grid, block = dims(*geometry.grid), dims(*geometry.block)
        in_x, in_y = launch.kernel.cluster
        shared = runtime.enqueue(
            launch.rank, launch.kernel.entry, grid, block, geometry.shared_bytes, launch.address,
            in_x * in_y, geometry.grid[0] if in_y > 1 else 1, launch.overlaps,
            geometry.cooperative or self.processes, geometry.gpus_along_y,
        )  # fmt: skip
        if shared > _MAX_SHARED:
            raise LaunchError(
                f"{launch.kernel.name}: {shared} bytes of shared memory in a block; no GPU has "
                f"more than {_MAX_SHARED}"
            )


def touchable(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the ranges [begin, end) of a view: row by row, without the gaps between rows."""
    if tensor.numel() == 0:
        return
    dense = tensor.element_size()
    steps: list[list[int]] = []  # offsets in each dimension that leaves gaps
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        step = stride * tensor.element_size()
        if not steps and step <= dense:  # this dimension is dense, or has stride 0
            dense += step * (size - 1)
        elif size > 1:
            steps.append([step * index for index in range(size)])
    if math.prod(len(offsets) for offsets in steps) > _MAX_ROWS:
        last = tensor.data_ptr() + sum(offsets[-1] for offsets in steps)
        yield tensor.data_ptr(), last + dense
        return
    for offsets in product(*steps):
        begin = tensor.data_ptr() + sum(offsets)
        yield begin, begin + dense


def _check_geometry(kernel: HostKernel, geometry: LaunchGeometry) -> None:
    name, threads = kernel.name, math.prod(geometry.block)
    fits = all(0 <= n <= most for n, most in zip(geometry.grid, _MAX_GRID, strict=True))
    fits &= all(0 < n <= most for n, most in zip(geometry.block, _MAX_BLOCK, strict=True))
    if not fits or threads > _MAX_THREADS:
        raise LaunchError(
            f"{name}: no GPU supports {geometry}; a grid is at most {_MAX_GRID}, a block "
            f"{_MAX_BLOCK} and {_MAX_THREADS} threads"
        )
    if any(n % size for n, size in zip(geometry.grid, kernel.cluster, strict=False)):
        raise LaunchError(
            f"{name}: {geometry} is not a multiple of the cluster size {kernel.cluster}"
        )
    if math.prod(geometry.grid) * threads >= _MAX_TOTAL:
        raise LaunchError(f"{name}: {geometry} has too many threads to run on a CPU")
