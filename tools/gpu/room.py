"""How much GPU memory and how many cores there are for sections that run at the same time."""

from __future__ import annotations

import os

import torch

from gpu.sections import Section

CONTEXT_GIB = 0.75  # of a process, beside its tensors: the CUDA context and loaded kernels
_GIB = 1 << 30


def free_gib() -> float:
    """Return the GPU memory that is free now, in GiB; 0 without a GPU."""
    return torch.cuda.mem_get_info()[0] / _GIB if torch.cuda.is_available() else 0.0


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def hold_to(gib: float) -> None:
    """Let this process allocate no more GPU memory than a section's ``gib``.

    Beyond it torch raises OutOfMemoryError here, and not in a process beside this one.
    """
    total = torch.cuda.mem_get_info()[1] / _GIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, (gib - CONTEXT_GIB) / total))


def peak() -> dict[str, float]:
    """Return the most GPU memory that this process has held, in GiB; nothing without a GPU.

    Processes that it started are not counted.
    """
    if not torch.cuda.is_available():
        return {}
    return {"peak_gib": round(torch.cuda.max_memory_reserved() / _GIB + CONTEXT_GIB, 2)}


class Room:
    """Memory in GiB and cores, which running sections hold until they end."""

    def __init__(self, gib: float, cores: int) -> None:
        self.gib, self.cores = gib, cores
        self._held: dict[str, tuple[float, int]] = {}

    def processes(self, section: Section, wanted: int) -> int:
        """Return how many of a section's processes fit at once; 0 if it needs more than there is.

        ``wanted``: the most that it can use.
        """
        return min(wanted, int(self.gib // section.gib))

    def start(self, name: str, section: Section) -> bool:
        """Let a section begin if there is room for it beside those that run.

        One that needs more cores than there are runs when no other does. One that needs more memory
        holds none: it is not run at all.
        """
        shares = self.processes(section, section.shares)
        gib, cores = shares * section.gib, max(section.cores, shares)
        used_gib = sum(held[0] for held in self._held.values())
        used_cores = sum(held[1] for held in self._held.values())
        fits = used_cores + cores <= self.cores or not self._held
        if used_gib + gib > self.gib or not fits:
            return False
        self._held[name] = gib, cores
        return True

    def end(self, name: str) -> None:
        """Take back what a section held."""
        del self._held[name]
