"""The memory that prefill attention works in: made once, shared by all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kiln.jit_kernels.ops.attention_prefill.tiles import most_tiles


@dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """What prefill attention needs beside its arguments: made once, shared by all layers.

    ``counter`` is zero between launches. Only one stream at a time may use a workspace.
    """

    group: int  # query heads a KV head
    items: Mapping[int, torch.Tensor]  # by window: [1 + capacity, 4] int32, a header, then tiles
    counter: torch.Tensor  # [1] int32

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Refuse a step that could need more than there is.

        Raises ValueError that names the numbers.
        """
        need = most_tiles(num_requests, num_tokens, self.group)
        has = min(items.shape[0] - 1 for items in self.items.values())
        if need > has:
            raise ValueError(
                f"the prefill workspace has room for {has} tiles; {num_requests} requests with "
                f"{num_tokens} tokens may need {need}"
            )


def make_prefill_workspace(
    *,
    max_requests: int,
    max_tokens: int,
    group: int,
    device: torch.device,
    windows: Sequence[int] = (0,),
) -> PrefillWorkspace:
    """Return a workspace for steps of at most these sizes. ``windows``: those in use, 0 for none.

    It takes 16 bytes for each 128 rows, a row being a token and one of a KV head's query heads.
    """
    rows = 1 + most_tiles(max_requests, max_tokens, group)
    items = {window: torch.zeros(rows, 4, dtype=torch.int32, device=device) for window in windows}
    return PrefillWorkspace(group, items, torch.zeros(1, dtype=torch.int32, device=device))
