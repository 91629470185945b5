"""Large tensors of zeros, which take no time and no memory until they are written."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch


def zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros.

    On a CPU the system gives each page when it is first written. ``torch.zeros`` writes all pages,
    which takes about a second for a GiB. Raises RuntimeError, on a GPU torch.OutOfMemoryError, if
    memory runs out.
    """
    num_bytes = math.prod(sizes) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(tuple(sizes), dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"no memory for {num_bytes} bytes: {error}") from error
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(tuple(sizes))
