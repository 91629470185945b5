"""What a group needs of kernels that sum for it: the interface of CustomAllReduceV2."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from kiln.jit_kernels.ops.all_reduce.layout import Algorithm


class SumKernels(Protocol):
    """Sums of one group, where kernels can do them. ``custom_all_reduce`` says more of each."""

    def algorithm_for(self, x: torch.Tensor) -> Algorithm | None:
        """Return the algorithm that sums x; None: torch's."""

    def custom_all_reduce(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
    ) -> torch.Tensor:
        """Return the sum of all ranks' x, in ``out`` if it is given."""

    def should_fuse(self, x: torch.Tensor) -> bool:
        """Return whether the fused kernel takes x."""

    def fused_all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weight_offset: float,
        round_once: bool,
    ) -> None:
        """Add the sum of all ranks' x to the residual, and leave the norm of the result in x."""

    def capture(self) -> AbstractContextManager[None]:
        """Surround the capture of a CUDA graph that contains calls."""

    def before_replay(self) -> None:
        """Order a graph with calls, which is replayed next, behind the latest call."""

    def set_patience(self, watchdog_ms: int) -> None:
        """Change how long calls from now on wait for another rank, in milliseconds."""

    def check(self) -> None:
        """Raise CustomAllReduceTimeout if a rank was late."""

    def abort(self) -> None:
        """End the calls that wait for a rank that is gone, from any thread."""

    def close(self) -> None:
        """Free what the ranks share, together with all other ranks."""
