"""A group whose ranks are all on one device: for tests, warm-up and measurements."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.all_reduce.functions import all_reduce, fused_all_reduce_add_rms_norm
from kiln.jit_kernels.ops.all_reduce.layout import Algorithm, Layout
from kiln.jit_kernels.ops.all_reduce.members import WATCHDOG_MS, Members, virtual_members
from kiln.jit_kernels.ops.all_reduce.record import LateRank, late_ranks


class VirtualGroup:
    """Virtual ranks, which one launch runs together with the kernels of real groups.

    Data does not leave the GPU, so times tell nothing about links between GPUs. ``max_bytes``: the
    largest message; ``max_blocks``: thread blocks of each rank. The blocks of all ranks must fit on
    the GPU at once, or launches fail. Raises ValueError.
    """

    def __init__(
        self,
        world: int,
        device: torch.device | str,
        *,
        max_bytes: int,
        max_blocks: int,
        watchdog_ms: int = WATCHDOG_MS,
        calls: int = 0,
    ) -> None:
        """Make the buffers. ``calls``: what their counters begin with, for tests of wrapping."""
        self.layout = Layout(world, max_blocks, max_bytes, max_bytes)
        self.members: Members = virtual_members(
            self.layout, device, watchdog_ms=watchdog_ms, calls=calls
        )

    def all_reduce(
        self, x: torch.Tensor, algorithm: Algorithm, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of x [world, ...] over the ranks, once for each of them."""
        return all_reduce(x, self.members, algorithm, out=out)

    def fused_all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the sum of x [world, rows, d] to the residuals in place; return their norms."""
        return fused_all_reduce_add_rms_norm(x, residual, weight, eps, self.members)

    def late_ranks(self) -> list[LateRank]:
        """Return which ranks waited in vain, and for whom; empty if none did. Waits for the GPU."""
        return late_ranks(self.members.record)
