"""The public functions of prefill attention."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.ops.attention.checks import checked
from kiln.jit_kernels.ops.attention_prefill.spec import PAGED_PREFILL, PREFILL_PLAN
from kiln.jit_kernels.ops.attention_prefill.workspace import (
    PrefillWorkspace,
    make_prefill_workspace,
)
from kiln.jit_kernels.ops.shared.shapes import takes_arrays
from kiln.jit_kernels.torch_ops import call


@takes_arrays
def paged_prefill(  # noqa: PLR0913 (all that attention depends on)
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: PrefillWorkspace | None = None,
) -> torch.Tensor:
    """Return the attention of requests with more than 16 tokens in this step over their paged keys.

    Arguments, results and errors as in paged_attention, which serves the other requests: their rows
    are not written. The kernel supports soft_cap only with bf16 queries of head_dim above 64;
    otherwise a GPU raises NoSuchKernel, and a CPU runs the reference. With ``workspace``,
    its plan for this step (``plan_prefill``) is used, and only ``out`` is allocated. Source:
    https://arxiv.org/abs/2307.08691
    """
    a = checked(
        "paged_prefill", out=out, lse=lse, query=query, key_pool=key_pool, value_pool=value_pool,
        block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, sinks=sinks,
        scale=scale, window=window, soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    group = query.shape[1] // key_pool.shape[1]
    if workspace is None:
        workspace = make_prefill_workspace(
            max_requests=seq_lens.shape[0],
            max_tokens=query.shape[0],
            group=group,
            device=query.device,
            windows=(window,),
        )
        plan_prefill(workspace, seq_lens, cu_seqlens_q, query.shape[0])
    if window not in workspace.items or workspace.group != group:
        raise ValueError(
            f"paged_prefill: window {window}, {group} heads per KV head: the workspace has "
            f"{list(workspace.items)} and {workspace.group}"
        )
    launch_paged_prefill(workspace, **vars(a))
    return a.out  # type: ignore[no-any-return]


def launch_paged_prefill(workspace: PrefillWorkspace, **arguments: Any) -> None:
    """Run paged_prefill on checked arguments, with the plan of a workspace.

    See launch_paged_attention for the arguments and errors.
    """
    items = workspace.items[arguments["window"]]
    call(PAGED_PREFILL, items=items, counter=workspace.counter, **arguments)


def plan_prefill(
    workspace: PrefillWorkspace,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    num_tokens: int,
) -> None:
    """Plan the work of a step on the device, with one launch for each window of a workspace.

    seq_lens [num_requests], cu_seqlens_q [num_requests + 1]: int32. Raises ValueError with the
    sizes if a step of these sizes may need more than the workspace has.
    """
    workspace.check(seq_lens.shape[0], num_tokens)
    for window, items in workspace.items.items():
        call(
            PREFILL_PLAN,
            items=items,
            seq_lens=seq_lens,
            cu_seqlens_q=cu_seqlens_q,
            group=workspace.group,
            window=window,
        )
