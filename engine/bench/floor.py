"""The shortest possible time of a decode step: the bytes it must read over the copy bandwidth."""

from __future__ import annotations

import torch

from kiln.engine.models.costs import parameters_read
from kiln.engine.models.hf_config import HFConfig


def decode_bytes(
    config: HFConfig, dtype: torch.dtype, kv_dtype: torch.dtype, num_requests: int, context: int
) -> int:
    """Return the bytes that a decode step of ``num_requests`` rows must read.

    These are the weights once, and the keys and values of ``context`` tokens per request. A layer
    with a window reads only the keys and values inside it.
    """
    weights = parameters_read(config, num_requests) * dtype.itemsize
    keys = sum(min(context, window or context) for window in config.windows)
    token_bytes = 2 * config.attention.kv_size * kv_dtype.itemsize  # in one layer
    return weights + num_requests * keys * token_bytes
