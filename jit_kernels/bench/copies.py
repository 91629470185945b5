"""Several copies of one call's inputs, so that each launch finds the L2 cache cold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kiln.jit_kernels.parameters import Arguments

_MAX_COPIES = 256
_SHARE_OF_FREE = 4  # copies take at most this part of the free memory: one in four
_TIMES_L2 = 2  # bytes between two uses of one copy, in caches: well past what can survive


def num_copies(bytes_touched: int, bytes_held: int, l2_bytes: int, free_bytes: int) -> int:
    """Return how many copies make each launch find the L2 cold, as far as memory allows.

    At least 2. ``bytes_touched`` a launch; ``bytes_held`` by one copy of the tensors.
    """
    wanted = -(-_TIMES_L2 * l2_bytes // max(bytes_touched, 1))
    fits = free_bytes // _SHARE_OF_FREE // max(bytes_held, 1)
    return max(2, min(wanted, fits, _MAX_COPIES))


def is_cold(copies: int, bytes_touched: int, l2_bytes: int) -> bool:
    """Return whether so many copies leave nothing of a launch's inputs in the L2.

    Small inputs stay warm: of these there would have to be more copies than is practical, and in a
    model they are warm too, having just been written. On a CPU (no ``l2_bytes``) nothing is said.
    """
    return l2_bytes > 0 and copies * bytes_touched >= _TIMES_L2 * l2_bytes


def copies_of(arguments: Arguments, count: int) -> list[Arguments]:
    """Return the arguments and count - 1 copies of them."""
    return [arguments, *(copy_to(arguments) for _ in range(count - 1))]


def copy_to(arguments: Arguments, device: str | None = None) -> Arguments:
    """Return a copy of a call's arguments, on another device if one is named.

    Shapes, strides and the gaps between rows stay, and views of one memory are views of one again.
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
    """Return the bytes of the memory behind some arguments, each piece once."""
    return sum(storage.nbytes() for storage in _storages(arguments).values())


def _storages(arguments: Sequence[Any]) -> dict[int, torch.UntypedStorage]:
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
