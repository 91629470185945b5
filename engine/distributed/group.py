"""A group of ranks that exchange tensors, through NCCL on GPUs and gloo on CPUs.

A layer names its group, as torch's functional collectives do: a traced graph can hold a text, but
no group. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from itertools import chain, count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed import distributed_c10d

from kiln.engine.distributed.sum_kernels import SumKernels
from kiln.jit_kernels.ops.all_reduce.record import FUSED

_c10d: Any = distributed_c10d  # torch types only part of it
_POLL_SECONDS = 0.001
_CLOSE_SECONDS = 5.0  # for all ranks to close their connections

logger = logging.getLogger(__name__)
_groups: WeakValueDictionary[str, Group] = WeakValueDictionary()
_naming = threading.Lock()


class Group:
    """The ranks of an engine. ``backend`` None: this process alone.

    ``backend`` is torch's own for the device, such as ProcessGroupGloo, and not torch's default
    group: a program may have several engines, and a default group of its own.
    """

    def __init__(self, rank: int, size: int, device: torch.device, backend: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.name = ""
        self._backend = backend
        self._calls: Counter[str] = Counter()
        self._kernels: SumKernels | None = None
        self._is_broken = False  # a rank is gone
        self._frees: list[Callable[[], None]] = []
        self._aborting: threading.Thread | None = None
        if size > 1:
            with _naming:  # engines may start in several threads at once
                self.name = _free_name(size)
                _groups[self.name] = self

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace x, contiguous, by the sum of all ranks' x: the same bits on every rank.

        On a GPU it is queued on the current stream.
        """
        if self.size == 1:
            return
        if self._kernels is not None:
            algorithm = self._kernels.algorithm_for(x)
            if algorithm is not None:
                self._kernels.custom_all_reduce(x, out=x, algorithm=algorithm)
                self._calls[algorithm] += 1
                return
        self._calls["torch"] += 1
        self.all_reduce_by_torch(x)

    def all_reduce_by_torch(self, x: torch.Tensor) -> None:
        """Do the same through NCCL or gloo, and do not count it."""
        options = _c10d.AllreduceOptions()
        options.asyncOp = False
        _wait(self._backend.allreduce([x], options))

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weight_offset: float,
        round_once: bool,
    ) -> bool:
        """Add the sum of all ranks' x to the residual, and leave its norm in x, in one kernel.

        Returns False, and does nothing, if there is no kernel for a message of this size.
        """
        if self._kernels is None or not self._kernels.should_fuse(x):
            return False
        self._kernels.fused_all_reduce_add_rms_norm(
            x, residual, weight, eps, weight_offset, round_once
        )
        self._calls[FUSED] += 1
        return True

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the x of all ranks, [size * rows, columns]; x: [rows, columns], contiguous."""
        if self.size == 1:
            return x
        out = x.new_empty(self.size * x.shape[0], x.shape[1])
        options = _c10d.AllgatherOptions()
        options.asyncOp = False
        _wait(self._backend._allgather_base(out, x, options))
        return out

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace x, contiguous, by that of rank 0."""
        if self.size == 1:
            return
        options = _c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = False
        _wait(self._backend.broadcast([x], options))

    def minimum(self, numbers: Sequence[int]) -> list[int]:
        """Return the smallest of all ranks' numbers, one by one; waits for the device."""
        if self.size == 1 or not numbers:
            return list(numbers)
        together = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        options = _c10d.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp.MIN
        options.asyncOp = False
        _wait(self._backend.allreduce([together], options))
        found: list[int] = together.tolist()
        return found

    def meet(self, seconds: float) -> bool:
        """Wait until every rank is here; return whether they came in time. Waits for the device."""
        if self.size == 1 or self._is_broken:
            return self.size == 1
        here = torch.zeros(1, dtype=torch.int64, device=self.device)
        options = _c10d.AllreduceOptions()
        options.timeout = timedelta(seconds=seconds)
        try:
            work = self._backend.allreduce([here], options)
            until = time.monotonic() + seconds
            while not work.is_completed():
                if time.monotonic() > until:
                    return False
                time.sleep(_POLL_SECONDS)
            work.wait()
        except RuntimeError:  # of connections whose other end is gone
            return False
        return True

    def stats(self) -> Mapping[str, int]:
        """Return how often tensors were summed, by algorithm: "torch" is NCCL or gloo."""
        return dict(self._calls)

    def count(self, calls: Mapping[str, int]) -> None:
        """Count the sums of a CUDA graph that is replayed next, and keep their order."""
        self._calls.update(calls)
        if calls and self._kernels is not None:
            self._kernels.before_replay()

    def uncount(self, calls: Mapping[str, int]) -> None:
        """Take back what was counted for sums that did not run, as in a capture."""
        self._calls.subtract(calls)

    def use_kernels(self, kernels: SumKernels) -> None:
        """Let kernels do the sums that they can do. Every rank does it at the same time."""
        self._kernels = kernels

    def capture(self) -> AbstractContextManager[None]:
        """Surround the capture of a CUDA graph with sums."""
        return nullcontext() if self._kernels is None else self._kernels.capture()

    def set_patience(self, watchdog_ms: int) -> None:
        """Change how long a sum waits for another rank, in milliseconds, where that is limited."""
        if self._kernels is not None:
            self._kernels.set_patience(watchdog_ms)

    def check(self) -> None:
        """Raise CustomAllReduceTimeout if a rank did not come to a sum; waits for nothing."""
        if self._kernels is not None:
            self._kernels.check()

    def before_close(self, free: Callable[[], None]) -> None:
        """Call ``free``, which frees CUDA graphs, before the connections close.

        NCCL waits until no CUDA graph contains its calls.
        """
        self._frees.append(free)

    def abort(self) -> None:
        """End the calls that wait for a rank that is gone, from any thread. They raise.

        It does not wait for NCCL, which may need ``close`` to free the graphs first.
        """
        self._is_broken = True
        kernels = self._kernels
        if kernels is not None:
            kernels.abort()
        if self._backend is not None and self.device.type == "cuda" and self._aborting is None:
            self._aborting = _begin(self._backend.abort)

    def close(self) -> None:
        """Free the connections, and what the ranks share: all close at the same time.

        No other rank may wait for this one.
        """
        frees, self._frees = self._frees, []
        for free in frees:
            free()
        kernels, self._kernels = self._kernels, None
        if kernels is not None:
            kernels.close()
        _groups.pop(self.name, None)
        backend, self._backend = self._backend, None
        if backend is None:
            return
        closing = self._aborting or _begin(backend.shutdown)
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning(
                "the connections of rank %d of %d have not closed within %g s; they end with this "
                "process", self.rank, self.size, _CLOSE_SECONDS,
            )  # fmt: skip


def group_named(name: str) -> Group:
    """Return the open group of a name. Raises LookupError."""
    group = _groups.get(name)
    if group is None:
        raise LookupError(f"the group {name!r} of ranks is closed, or was never connected")
    return group


def group_name(world: int) -> str:
    """Return the name of a process's first group of ``world`` ranks; "" for a single rank."""
    return f"tp{world}" if world > 1 else ""


def _free_name(size: int) -> str:
    """Return a name that depends on the size alone, if it can: it is part of compiled pieces."""
    first = group_name(size)
    others = (f"{first}.{number}" for number in count(1))
    return next(name for name in chain([first], others) if name not in _groups)


def _begin(end: Callable[[], None]) -> threading.Thread:
    """Call ``end``, which closes connections, in a thread of its own: it may never return."""

    def run() -> None:
        with suppress(RuntimeError):  # of connections whose other end is gone
            end()

    thread = threading.Thread(target=run, name="kiln-disconnect", daemon=True)
    thread.start()
    return thread


def _wait(work: Any) -> None:
    """Wait for a collective; on a GPU only the current stream waits."""
    if work is not None:
        work.wait()
