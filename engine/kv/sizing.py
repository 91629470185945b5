"""Compute the size of the KV pool."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kiln.engine.config import KVConfig
from kiln.engine.errors import ConfigError
from kiln.engine.kv.pool import KVShape

_GIB = 2**30


def size_pool(
    config: KVConfig,
    shape: KVShape,
    device: torch.device,
    max_model_len: int,
    step_bytes: int = 0,
) -> int:
    """Return the number of blocks: as set, else what fits in memory after the weights are loaded.

    On a GPU, ``step_bytes`` stay free for the temporary memory of a step. Raises ConfigError if
    one request of ``max_model_len`` tokens would not fit.
    """
    num_blocks = config.num_blocks
    if num_blocks is None:
        block_bytes = shape.bytes_per_token * config.block_size
        num_blocks = max(_pool_bytes(config, device, step_bytes), 0) // block_bytes
    largest = num_blocks * config.block_size
    if largest < max_model_len:
        message = _too_small(config, shape, device, max_model_len, largest)
        if step_bytes:
            message += (
                f", or lower max_num_batched_tokens: a step needs {step_bytes / _GIB:.3g} GiB"
            )
        raise ConfigError(message)
    return num_blocks


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Run a step and return torch's peak memory for it, in bytes."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def _pool_bytes(config: KVConfig, device: torch.device, step_bytes: int) -> int:
    """Return the bytes left for the pool, by ``kv_memory_gib`` or by ``gpu_memory_utilization``."""
    memory = config.pool_memory(device.type)
    if device.type == "cpu":
        return int(memory * _GIB)
    torch.cuda.empty_cache()  # step_bytes already counts torch's cached memory
    free, total = torch.cuda.mem_get_info(device)
    return int(memory * total) - (total - free) - step_bytes


def _too_small(
    config: KVConfig, shape: KVShape, device: torch.device, max_model_len: int, largest: int
) -> str:
    needed = max_model_len * shape.bytes_per_token / _GIB
    if config.num_blocks is not None:
        flag = "num_kv_blocks"
    else:
        flag = "kv_memory_gib" if device.type == "cpu" else "gpu_memory_utilization"
    fits = f"set max_model_len to {largest} or less" if largest >= 2 else "use a smaller model"
    return (
        f"the KV pool holds {largest} tokens, but one request of max_model_len={max_model_len} "
        f"needs {needed:.3g} GiB:\n{fits}, or raise {flag}"
    )
