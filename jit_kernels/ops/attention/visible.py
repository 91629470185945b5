"""Which keys a token sees under a window or a chunk: the host's side of ``visible.cuh``."""

from __future__ import annotations

from typing import TypeVar

import torch

MOST_WINDOW = 2**30  # the kernels add numbers of tokens to a window in 32 bits

_Position = TypeVar("_Position", int, torch.Tensor)


def first_visible(end: _Position, window: int) -> _Position:
    """Return the first visible key of a token that sees no key from ``end`` on.

    window w above 0: its last w keys; -c: those of its own chunk, where chunks of c keys begin at
    multiples of c; 0: all. It never falls as ``end`` rises, and it may be negative.
    """
    if window > 0:
        return end - window
    return end - 1 - (end - 1) % -window if window else 0 * end
