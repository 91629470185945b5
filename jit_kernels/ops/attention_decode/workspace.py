"""The workspace of decode attention: allocated once, shared by all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kiln.jit_kernels.declare.arch import gpu
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import HOST_GPU
from kiln.jit_kernels.ops.attention.variants import head_tile
from kiln.jit_kernels.ops.attention_decode.splits import (
    ITEM_INTS,
    SCALE_ROOM,
    TILE_ROWS,
    UNSENT,
    Shape,
    SplitRule,
    most_items,
    most_rows,
    split_rule,
)


@dataclass(frozen=True, slots=True)
class Workspace:
    """The memory that decode attention needs besides its arguments.

    ``partials`` are the partial results of splits: float32 rows of head_dim, each with its scale.
    ``mail`` is the mailbox through which blocks send such rows to each other. Between launches all
    its words are UNSENT, and the counters ``arrivals`` are zero. Only one stream at a time may use
    a workspace.
    """

    rule: SplitRule
    num_heads: int
    num_kv_heads: int
    max_requests: int
    items: Mapping[int, torch.Tensor]  # window -> [1 + max_items, 16] int32
    partials: torch.Tensor  # [max_rows, num_kv_heads, head_dim + SCALE_ROOM] float32
    mail: torch.Tensor  # [max_mail, num_kv_heads, head_dim + SCALE_ROOM] int32
    arrivals: torch.Tensor  # [max_rows, num_kv_heads, warps of a block] int32
    shared: torch.Tensor  # [max_requests] int32: first blocks in common with the request before

    @property
    def max_items(self) -> int:
        """The number of work items that fit."""
        return next(iter(self.items.values())).shape[0] - 1

    @property
    def num_bytes(self) -> int:
        """Total bytes of device memory."""
        tensors = [self.partials, self.mail, self.arrivals, self.shared, *self.items.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def check(self, num_requests: int, num_tokens: int, max_blocks: int) -> None:
        """Check that the workspace is large enough for any step of these sizes.

        Raises ValueError with the sizes if it may not be.
        """
        group = self.num_heads // self.num_kv_heads
        sizes = (num_requests, num_tokens, max_blocks, group)
        needs = (num_requests, most_items(self.rule, *sizes), most_rows(self.rule, *sizes))
        has = (self.max_requests, self.max_items, self.partials.shape[0])
        if any(need > room for need, room in zip(needs, has, strict=True)):
            raise ValueError(
                f"the attention workspace has room for {has[0]} requests, {has[1]} work items and "
                f"{has[2]} partial rows; {num_requests} requests with {num_tokens} tokens and "
                f"{max_blocks} blocks each may need {needs[0]}, {needs[1]} and {needs[2]}"
            )


def make_workspace(  # noqa: PLR0913 (the largest sizes of a step)
    *,
    max_requests: int,
    max_tokens: int,
    max_blocks: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype,
    device: torch.device,
    windows: Sequence[int] = (0,),
    rule: SplitRule | None = None,
) -> Workspace:
    """Return a workspace for steps of up to these sizes. ``max_blocks``: of one request.

    With P blocks resident on the GPU it takes at most about max_requests * 16 * P * (4 * head_dim +
    32) bytes, plus the mailbox. If each request has one token, it takes group / 16 of that: on an
    H200 with head_dim 128, at most 3.4 MB per request. ``windows``: those in use, as in
    paged_attention. ``rule`` None: the rule of the device.
    """
    shape = Shape(head_tile(head_dim), kv_dtype.itemsize)
    if rule is None:
        machine = gpu(device.index or 0) if device.type == "cuda" else HOST_GPU
        rule = split_rule(shape, num_kv_heads, machine)
    group = num_heads // num_kv_heads
    sizes = (max_requests, max_tokens, max_blocks, group)
    items, rows = most_items(rule, *sizes), most_rows(rule, *sizes)
    floats = (num_kv_heads, head_dim + SCALE_ROOM)
    integers = partial(torch.zeros, dtype=torch.int32, device=device)
    return Workspace(
        rule=rule,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        max_requests=max_requests,
        items={window: integers((1 + items, ITEM_INTS)) for window in windows},
        partials=torch.empty(rows, *floats, device=device),
        mail=make_mail(rule, rows, *floats, device),
        arrivals=integers((rows, num_kv_heads, shape.warps)),
        shared=integers((max_requests,)),
    )


def make_mail(
    rule: SplitRule, max_rows: int, num_kv_heads: int, floats: int, device: torch.device | str
) -> torch.Tensor:
    """Return an empty mailbox with room for the messages of a step.

    It has room for ``max_rows`` rows, or for all rows of the ``most`` items of the rule if those
    are fewer, and for as many sums of rows. In a step with more rows, partial results are merged by
    counters instead. ``floats``: per message.
    """
    rows = 2 * min(max_rows, rule.most * TILE_ROWS)
    return torch.full((rows, num_kv_heads, floats), UNSENT, dtype=torch.int32, device=device)


def workspace_for(a: Arguments, rule: SplitRule | None = None) -> Workspace:
    """Return a workspace for one call of paged_attention with these arguments."""
    return make_workspace(
        max_requests=a.block_table.shape[0],
        max_tokens=a.query.shape[0],
        max_blocks=a.block_table.shape[1],
        num_heads=a.query.shape[1],
        num_kv_heads=a.key_pool.shape[1],
        head_dim=a.query.shape[2],
        kv_dtype=a.key_pool.dtype,
        device=a.query.device,
        windows=(a.window,),
        rule=rule,
    )
