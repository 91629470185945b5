"""How many blocks the KV pool gets."""

from __future__ import annotations

import torch

from kiln.engine.config import KVConfig
from kiln.engine.errors import ConfigError
from kiln.engine.kv.pool import KVShape

_GIB = 2**30


def size_pool(config: KVConfig, shape: KVShape, device: torch.device, max_model_len: int) -> int:
    """Return the number of blocks: as set, or what memory holds once the weights are loaded.

    Raises ConfigError when one request of ``max_model_len`` tokens would not fit.
    """
    num_blocks = config.num_blocks
    if num_blocks is None:
        block_bytes = shape.bytes_per_token * config.block_size
        num_blocks = max(_pool_bytes(config, device), 0) // block_bytes
    largest = num_blocks * config.block_size
    if largest < max_model_len:
        raise ConfigError(_too_small(config, shape, device, max_model_len, largest))
    return num_blocks


def _pool_bytes(config: KVConfig, device: torch.device) -> int:
    """Return the bytes left for the pool, by ``kv_memory_gib`` or by ``gpu_memory_utilization``."""
    memory = config.pool_memory(device.type)
    if device.type == "cpu":
        return int(memory * _GIB)
    free, total = torch.cuda.mem_get_info(device)
    return int(memory * total) - (total - free)


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
        f"the KV pool holds {largest} tokens, one request of max_model_len={max_model_len} needs "
        f"{needed:.3g} GiB:\n{fits}, or raise {flag}"
    )
