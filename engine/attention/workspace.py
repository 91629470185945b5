"""Buffers that attention gathers keys and values into, reused across steps."""

from __future__ import annotations

import torch


class Workspace:
    """Two buffers that grow to the largest gather so far. Attention computes in ``dtype``.

    New memory costs a CPU one page fault per 4 KiB, several times the cost of the gather. Layers
    run one after the other, so they share one pair.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._keys = torch.empty(0)
        self._values = torch.empty(0)

    def gather(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the slots' keys and values, [num_slots, num_kv_heads, head_dim] each.

        They are valid until the next call.
        """
        if keys.dtype != self._dtype:  # 8-bit floats: torch can gather them only as bytes
            keys, values = (
                pool.view(torch.uint8).index_select(0, slots).view(pool.dtype).to(self._dtype)
                for pool in (keys, values)
            )
            return keys, values
        count = slots.shape[0]
        if count > self._keys.shape[0]:
            self._keys = keys.new_empty((count, *keys.shape[1:]))
            self._values = values.new_empty((count, *values.shape[1:]))
        return (
            torch.index_select(keys, 0, slots, out=self._keys[:count]),
            torch.index_select(values, 0, slots, out=self._values[:count]),
        )
