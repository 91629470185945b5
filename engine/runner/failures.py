"""What an error of the device means, in words that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kiln.engine.errors import ConfigError, DeviceError, KilnError

# Of RuntimeErrors that are not torch.OutOfMemoryError: torch's CPU allocator, CUDA's driver.
_NO_MEMORY = ("can't allocate memory", "out of memory", "OUT_OF_MEMORY")


@contextmanager
def explained(device: torch.device, doing: str) -> Iterator[None]:
    """Translate what torch and the driver raise, where Kiln knows more than they say.

    Raises DeviceError when the device fails every call from now on, ConfigError naming the
    settings to lower when memory ran out; any other error goes through.
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

    After an illegal access, a failed device-side assert or an ECC error, each further call on the
    same context returns that error; after any other error the device still synchronizes.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as lost:
        raise DeviceError(
            f"{device} failed in {doing} and can be used again only by a new process: "
            f"{_first_line(lost)} (first noticed as: {_first_line(error)}). Start Kiln again; "
            "CUDA_LAUNCH_BLOCKING=1 tells which call failed"
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
