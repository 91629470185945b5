"""Sums over the ranks of one machine by Kiln's own kernels, where they are proven to work.

All ranks decide alike, because they tell each other whatever only one of them knows. Otherwise
``disabled_reason`` says why NCCL or gloo does the sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from kiln.engine.distributed import tune_table
from kiln.engine.distributed.all_reduce_plan import Plan
from kiln.engine.distributed.group import Group
from kiln.engine.distributed.late_rank import LateRecord
from kiln.engine.distributed.peer_access import RankMemory
from kiln.engine.distributed.peers import Joined, join_peers
from kiln.engine.distributed.stream_guard import CudaStreams, StreamGuard
from kiln.engine.distributed.tuner import SIZES, Tuned, measure
from kiln.engine.errors import ConfigError
from kiln.jit_kernels.declare.arch import gpu, index_of
from kiln.jit_kernels.declare.spec import HOST_GPU
from kiln.jit_kernels.ops.all_reduce import functions
from kiln.jit_kernels.ops.all_reduce.layout import VECTOR, Algorithm, vectors
from kiln.jit_kernels.ops.all_reduce.members import WATCHDOG_MS, Members
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig
from kiln.jit_kernels.ops.all_reduce.record import FUSED


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one inside a ``with`` block."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CLOSE_SECONDS = 5.0  # for all ranks to close, before this one leaves the memory to the driver


class CustomAllReduceV2:
    """The sums of one group; every rank makes the same calls in the same order.

    ``device``: where the messages are, which may be another device than that of the group's own
    exchanges. ``config``: limits of message sizes; if not given, those measured on this hardware,
    else defaults. ``watchdog_ms``: how long a rank waits for another. ``dtypes``: those that are
    summed. ``plan``: all choices, instead of ``config`` and the environment's.

    Raises ConfigError on every rank if their settings differ, or if KILN_ALL_REDUCE=jit and it
    cannot work; KernelError if the toggles forbid what is needed.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        *,
        config: ModeConfig | None = None,
        watchdog_ms: int = WATCHDOG_MS,
        dtypes: Sequence[torch.dtype] = DTYPES,
        plan: Plan | None = None,
    ) -> None:
        self.device = device
        self._group = group
        self._dtypes = frozenset(dtypes)
        self._calls: Counter[str] = Counter()
        self._members: Members | None = None
        self._memory: RankMemory | None = None
        self._record = LateRecord(group.rank, group.size, device)
        self._guard = StreamGuard(CudaStreams(device) if device.type == "cuda" else None)
        with on_device(device):
            joined = join_peers(
                group, device, tuple(dtypes), config, plan, self._record, watchdog_ms
            )
        if isinstance(joined, Joined):
            self.plan: Plan = joined.plan
            self.fabric = joined.fabric
            self._members, self._memory = joined.members, joined.memory
            self.disabled_reason = ""
        else:
            self.disabled_reason = joined

    @property
    def disabled(self) -> bool:
        """Whether torch does all sums; ``disabled_reason`` says why."""
        return self._members is None

    def algorithm_for(self, x: torch.Tensor) -> Algorithm | None:
        """Return the algorithm that sums x; None: torch's. The same on every rank."""
        if self._members is None or not self._takes(x):
            return None
        return self.plan.algorithm_for(x.numel() * x.element_size())

    def should_custom_ar(self, x: torch.Tensor) -> bool:
        """Return whether a message is dense, of a known dtype, and not too large.

        It depends on nothing in which ranks may differ.
        """
        return self.algorithm_for(x) is not None

    def custom_all_reduce(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
    ) -> torch.Tensor:
        """Return the sum of all ranks' x; x is not written, unless ``out`` is x.

        The bits are the same for every algorithm and rank. Raises ValueError if x cannot be summed
        here, CustomAllReduceTimeout if a rank was late in an earlier call.
        """
        algorithm = algorithm or self.algorithm_for(x)
        if algorithm is None:
            raise ValueError(
                f"custom_all_reduce: {list(x.shape)} of {x.dtype}, "
                f"{self.disabled_reason or 'too large, not dense, or of another dtype'}: ask "
                "should_custom_ar first"
            )
        members = self._enter()
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        functions.all_reduce(x.reshape(1, -1), members, algorithm, out=out.view(1, -1))
        self._calls[algorithm] += 1
        return out

    def should_fuse(self, x: torch.Tensor) -> bool:
        """Return whether ``fused_all_reduce_add_rms_norm`` takes x [rows, d]."""
        if self._members is None or x.dim() != 2 or not self._takes(x):
            return False
        row = vectors(x.shape[1] * x.element_size()) * VECTOR
        return self.plan.fuses(x.shape[0] * row)

    def fused_all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weight_offset: float,
        round_once: bool,
    ) -> None:
        """Add the sum of all ranks' x to the residual, and leave the norm of the result in x.

        x, residual: [rows, d], contiguous, both written; weight: [d]. The bits of
        ``custom_all_reduce`` and then kiln::fused_add_rms_norm.
        """
        members, one = self._enter(), x.unsqueeze(0)
        functions.fused_all_reduce_add_rms_norm(
            one, residual.unsqueeze(0), weight, eps, members,
            weight_offset=weight_offset, round_once=round_once, out=one,
        )  # fmt: skip
        self._calls[FUSED] += 1

    def capture(self) -> AbstractContextManager[None]:
        """Surround the capture of a CUDA graph that contains calls.

        Nothing is registered: the kernels read messages on their own rank alone. Calls of several
        streams are ordered inside the graph.
        """
        return self._guard.capture()

    def before_replay(self) -> None:
        """Order a graph with calls, which is replayed next, behind the latest call."""
        self._guard.enter()

    def set_patience(self, watchdog_ms: int) -> None:
        """Change how long calls from now on wait for another rank, in milliseconds."""
        if self._members is not None:
            self._members = replace(self._members, watchdog_ms=watchdog_ms)

    def check(self) -> None:
        """Raise CustomAllReduceTimeout if a rank was late; does not wait for the device."""
        if self._members is not None:
            self._record.check()

    def tune(self, sizes: Sequence[int] = SIZES, dtype: torch.dtype = torch.bfloat16) -> Tuned:
        """Measure the fastest plan for messages of some sizes in bytes; ``store`` can keep it.

        All ranks call it at the same time. This object's own plan stays as it is. Raises
        ConfigError if the kernels cannot run, or give wrong bits.
        """
        if self._members is None:
            raise ConfigError(f"nothing to tune, as torch sums: {self.disabled_reason}")
        most = HOST_GPU if self.device.type == "cpu" else gpu(index_of(self.device))
        return measure(
            partial(self._with_plan, dtype), self._group, self.device,
            sizes=sizes, dtype=dtype, most_blocks=most.num_multiprocessors,
        )  # fmt: skip

    def store(self, tuned: Tuned) -> Path:
        """Write a measured plan where groups on the same hardware find it; on one rank.

        Raises ConfigError if the ranks share a GPU, or if there is no folder.
        """
        key = tune_table.key_of(self._group.size, self.device, self.fabric)
        return tune_table.store(key, tuned.plan, list(tuned.rows))

    def _with_plan(self, dtype: torch.dtype, plan: Plan) -> CustomAllReduceV2:
        other = CustomAllReduceV2(self._group, self.device, dtypes=(dtype,), plan=plan)
        if other.disabled:
            raise ConfigError(f"nothing to tune, as torch sums: {other.disabled_reason}")
        return other

    def abort(self) -> None:
        """End the calls that wait for a rank that is gone, from any thread; ``check`` raises."""
        self._record.stop()

    def stats(self) -> Mapping[str, int]:
        """Return the calls by algorithm, and the waits between streams as "stream_waits"."""
        return {**self._calls, "stream_waits": self._guard.waits}

    def close(self) -> None:
        """Free the memory, together with all other ranks; safe to call more than once.

        No graph that contains calls may be replayed any more. If another rank does not come, the
        memory is left to the driver, which frees it at the process' end.
        """
        memory, self._memory, self._members = self._memory, None, None
        self.disabled_reason = self.disabled_reason or "it is closed"
        if memory is None:
            return
        with on_device(self.device):
            self._release(memory)

    def _release(self, memory: RankMemory) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._group.meet(_CLOSE_SECONDS):
            memory.close_peers()
            if self._group.meet(_CLOSE_SECONDS):
                memory.close()

    def _takes(self, x: torch.Tensor) -> bool:
        return x.dtype in self._dtypes and x.is_contiguous() and x.device.type == self.device.type

    def _enter(self) -> Members:
        if self._members is None:
            raise ValueError(f"the custom all-reduce is off: {self.disabled_reason}")
        self._record.check()
        self._guard.enter()
        return self._members
