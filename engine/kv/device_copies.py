"""Copies between KV blocks on a GPU and page-locked host memory, on a stream of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kiln.engine.errors import ConfigError
from kiln.engine.kv.pool import KVPool

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices
# Of one call. A step's own small copies wait for all that its copy engine has been given before.
_CALL_BYTES = 24 * 2**20


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order of reads, hints about two locations, and flags."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class DeviceCopies:
    """Copies between the blocks of a pool and slots, each page-locked uint8.

    One call of the driver copies many runs without a kernel (``cuMemcpyBatchAsync``, of CUDA 12.8
    and later). Older drivers get a call for each run.
    """

    def __init__(self, pool: KVPool, slots: Sequence[torch.Tensor]) -> None:
        planes, _, run = pool.planes.shape
        tokens = pool.block_size * pool.token_ids.itemsize
        self._pool = pool  # its memory must stay
        self._slots = slots
        self._stream = torch.cuda.Stream(pool.planes.device)
        self._steps = torch.tensor([run] * planes + [tokens])  # from block to block, by run
        self._places = torch.tensor([
            *(plane.data_ptr() for plane in pool.planes), pool.token_ids.data_ptr(),
        ])  # fmt: skip
        self._offsets = run * torch.arange(planes + 1)
        self._addresses = torch.tensor([slot.data_ptr() for slot in slots])
        self._batched = _batched_copy()
        self._blocks = max(1, _CALL_BYTES // int(self._steps.sum()))  # of one call
        self._ended = torch.cuda.Event(blocking=True)

    def __call__(self, blocks: list[int], slots: list[int], *, to_host: bool) -> None:
        """Copy, and wait until the copy has ended. Raises RuntimeError if the driver refuses."""
        torch.cuda.set_device(self._stream.device)  # of this thread
        for first in range(0, len(blocks), self._blocks):
            some = slice(first, first + self._blocks)
            if self._batched is None:
                self._copy_each(blocks[some], slots[some], to_host)
            else:
                self._copy_batch(blocks[some], slots[some], to_host)
            self._ended.record(self._stream)
            self._ended.synchronize()

    def _copy_batch(self, blocks: list[int], slots: list[int], to_host: bool) -> None:
        device = self._places + self._steps * torch.tensor(blocks)[:, None]
        host = self._offsets + self._addresses[torch.tensor(slots)][:, None]
        to, source = (host, device) if to_host else (device, host)
        sizes = self._steps.repeat(len(blocks), 1)
        assert self._batched is not None
        attributes, first, failed = (
            _Attributes(_IN_STREAM_ORDER),
            ctypes.c_size_t(),
            ctypes.c_size_t(),
        )
        error = self._batched(
            ctypes.c_void_p(to.data_ptr()),
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_void_p(sizes.data_ptr()),
            ctypes.c_size_t(sizes.numel()),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(self._stream.cuda_stream),
        )
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync failed: error {error} of the CUDA driver")

    @torch.inference_mode()
    def _copy_each(self, blocks: list[int], slots: list[int], to_host: bool) -> None:
        run = self._pool.planes.shape[2]
        with torch.cuda.stream(self._stream):
            for block, slot in zip(blocks, slots, strict=True):
                own = [*self._pool.planes[:, block], self._pool.token_bytes[block]]
                for run_of_block, run_of_slot in zip(
                    own, self._slots[slot].split(run), strict=True
                ):
                    to, source = (run_of_slot, run_of_block)[:: 1 if to_host else -1]
                    to.copy_(source, non_blocking=True)


def _batched_copy() -> Any:
    """Return ``cuMemcpyBatchAsync`` as CUDA 12.8 declares it; None if the driver is older."""
    return getattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyBatchAsync", None)


def page_lock(memory: torch.Tensor, device: torch.device) -> None:
    """Page-lock host memory, which then must not be freed before ``unlock``. Raises ConfigError."""
    with torch.cuda.device(device):  # else it could open a context on another one
        cudart = torch.cuda.cudart()
        error = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)
    if int(error):
        raise ConfigError(
            f"kv_offload_gib: {memory.numel() / 2**30:.3g} GiB of host memory could not be "
            f"page-locked: {error}; lower it, or see ulimit -l"
        )


def unlock(addresses: Sequence[int]) -> None:
    """Undo ``page_lock``."""
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
