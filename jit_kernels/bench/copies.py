"""Several copies of a call's inputs, so that each launch starts with a cold L2 cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kiln.jit_kernels.declare.parameters import Arguments

_MAX_COPIES = 256
_SHARE_OF_FREE = 4  # copies use at most a quarter of the free memory
_TIMES_L2 = 2  # bytes between two uses of one copy, in L2 sizes


def num_copies(bytes_touched: int, bytes_held: int, l2_bytes: int, free_bytes: int) -> int:
    """Return the number of copies (at least 2) for a cold L2 at each launch, if memory allows it.

    ``bytes_touched``: by one launch. ``bytes_held``: by one copy of the tensors.
    """
    wanted = -(-_TIMES_L2 * l2_bytes // max(bytes_touched, 1))
    fits = free_bytes // _SHARE_OF_FREE // max(bytes_held, 1)
    return max(2, min(wanted, fits, _MAX_COPIES))


def is_cold(copies: int, bytes_touched: int, l2_bytes: int) -> bool:
    """Return whether so many copies evict a launch's inputs from the L2 before their next use.

    Small inputs stay warm, because they would need too many copies. In a model they are warm too,
    because they have just been written. Always False on a CPU (no ``l2_bytes``).
    """
    return l2_bytes > 0 and copies * bytes_touched >= _TIMES_L2 * l2_bytes


def copies_of(arguments: Arguments, count: int) -> list[Arguments]:
    """Return the arguments and count - 1 copies of them."""
    return [arguments, *(copy_to(arguments) for _ in range(count - 1))]


def copy_to(arguments: Arguments, device: str | None = None) -> Arguments:
    """Return a copy of a call's arguments, on ``device`` if given.

    Shapes, strides and gaps between rows are kept. Views that share a storage share one again.
    """
    fresh = {}
    for address, storage in _storages(arguments).items():
        as_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        again = as_bytes.clone() if device is None else as_bytes.to(device, copy=True)
        fresh[address] = again.untyped_storage()

    def again_view(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = fresh[value.untyped_storage().data_ptr()]
        empty = torch.empty(0, dtype=value.dtype, device=storage.device)
        return empty.set_(storage, value.storage_offset(), value.shape, value.stride())

    return arguments._make(again_view(value) for value in arguments)


def bytes_held(arguments: Sequence[Any]) -> int:
    """Return the bytes of the storages behind some arguments, each storage once."""
    return sum(storage.nbytes() for storage in _storages(arguments).values())


def _storages(arguments: Sequence[Any]) -> dict[int, torch.UntypedStorage]:
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
