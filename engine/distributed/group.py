"""A group of ranks that exchange tensors, through NCCL on GPUs and gloo on CPUs.

A layer names its group, as torch's functional collectives do: a traced graph can hold a text, but
no group. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed import distributed_c10d

_c10d: Any = distributed_c10d  # torch types only part of it
_groups: WeakValueDictionary[str, Group] = WeakValueDictionary()


class Group:
    """The ranks of an engine. ``backend`` None: this process alone.

    ``backend`` is torch's own for the device, such as ProcessGroupGloo, and not torch's default
    group: a program may have several engines, and a default group of its own.
    """

    def __init__(self, rank: int, size: int, device: torch.device, backend: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.name = _free_name(size) if size > 1 else ""
        self._backend = backend
        self._calls: Counter[str] = Counter()
        if size > 1:
            _groups[self.name] = self

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace x, contiguous, by the sum of all ranks' x: the same bits on every rank.

        On a GPU it is queued on the current stream.
        """
        if self.size == 1:
            return
        self._calls["torch"] += 1
        options = _c10d.AllreduceOptions()
        options.asyncOp = False
        _wait(self._backend.allreduce([x], options))

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

    def stats(self) -> Mapping[str, int]:
        """Return how often tensors were summed, by algorithm: "torch" is NCCL or gloo."""
        return dict(self._calls)

    def count(self, calls: Mapping[str, int]) -> None:
        """Count sums that were queued without ``all_reduce``, as a CUDA graph does."""
        self._calls.update(calls)

    def uncount(self, calls: Mapping[str, int]) -> None:
        """Take back what was counted for sums that did not run, as in a capture."""
        self._calls.subtract(calls)

    def abort(self) -> None:
        """End the calls that wait for a rank that is gone, from any thread. They raise."""
        if self._backend is not None and self.device.type == "cuda":
            self._backend.abort()

    def close(self) -> None:
        """Free the connections. No other rank may wait for this one."""
        _groups.pop(self.name, None)
        backend, self._backend = self._backend, None
        if backend is not None:
            with suppress(RuntimeError):  # of connections whose other end is gone
                backend.shutdown()


def group_named(name: str) -> Group:
    """Return the open group of a name. Raises LookupError."""
    group = _groups.get(name)
    if group is None:
        raise LookupError(f"the group {name!r} of ranks is closed, or was never connected")
    return group


def _free_name(size: int) -> str:
    """Return a name that depends on the size alone, if it can: it is part of compiled pieces."""
    name, number = f"tp{size}", 0
    while name in _groups:
        number += 1
        name = f"tp{size}.{number}"
    return name


def _wait(work: Any) -> None:
    """Wait for a collective; on a GPU only the current stream waits."""
    if work is not None:
        work.wait()
