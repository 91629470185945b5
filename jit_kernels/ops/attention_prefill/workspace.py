"""The workspace of prefill attention: allocated once, shared by all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kiln.jit_kernels.ops.attention_prefill.tiles import most_tiles


@dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """The memory that prefill attention needs besides its arguments.

    ``counter`` is zero between launches. Only one stream at a time may use a workspace.
    """

    group: int  # query heads per KV head
    items: Mapping[int, torch.Tensor]  # window -> [1 + capacity, 4] int32: a header, then tiles
    counter: torch.Tensor  # [1] int32

    def check(self, num_requests: int, num_tokens: int) -> None:
        """Check that the workspace is large enough for any step of these sizes.

        Raises ValueError with the sizes if it may not be.
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
    """Return a workspace for steps of up to these sizes.

    It takes 16 bytes per 128 rows; a row is one query head of a token, among those of one KV head.
    ``windows``: those in use, as in paged_attention.
    """
    rows = 1 + most_tiles(max_requests, max_tokens, group)
    items = {window: torch.zeros(rows, 4, dtype=torch.int32, device=device) for window in windows}
    return PrefillWorkspace(group, items, torch.zeros(1, dtype=torch.int32, device=device))
