"""Translate device errors into helpful messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kiln.engine.errors import ConfigError, DeviceError, KilnError

# In RuntimeErrors of torch's CPU allocator and the CUDA driver, beside torch.OutOfMemoryError.
_NO_MEMORY = ("can't allocate memory", "out of memory", "OUT_OF_MEMORY")


@contextmanager
def explained(device: torch.device, doing: str) -> Iterator[None]:
    """Translate errors of torch and the driver into errors with advice.

    Raises DeviceError if the device fails permanently, and ConfigError naming the settings to
    lower if memory ran out. Other errors propagate unchanged.
    """
    try:
        yield
    except KilnError:
        raise
    except Exception as error:
        _check_device(device, doing, error)
        if _is_out_of_memory(error):
            raise ConfigError(_out_of_memory(device, doing, error)) from error
        raise


def _check_device(device: torch.device, doing: str, error: Exception) -> None:
    """Raise DeviceError if the device is lost.

    After an illegal access, a failed device-side assert or an ECC error, every further call in the
    context returns that error. After any other error, synchronizing the device still succeeds.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as lost:
        raise DeviceError(
            f"{device} failed in {doing} and can be used only by a new process: "
            f"{_first_line(lost)} (first noticed as: {_first_line(error)}). Start Kiln again; "
            "CUDA_LAUNCH_BLOCKING=1 shows which call failed"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def _out_of_memory(device: torch.device, doing: str, error: Exception) -> str:
    pool = "kv_memory_gib" if device.type == "cpu" else "gpu_memory_utilization"
    return (
        f"{device} ran out of memory in {doing}: lower max_num_batched_tokens or max_num_seqs (the "
        f"memory of a step), {pool} (the KV pool) or max_model_len ({_first_line(error)})"
    )


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).partition("\n")[0]
