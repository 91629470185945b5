"""The public functions of decode attention."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.ops.attention.checks import checked
from kiln.jit_kernels.ops.attention_decode.spec import (
    ATTENTION_PLAN,
    PAGED_ATTENTION,
    SHARED_BLOCKS,
)
from kiln.jit_kernels.ops.attention_decode.workspace import Workspace, workspace_for
from kiln.jit_kernels.ops.shared.shapes import takes_arrays
from kiln.jit_kernels.torch_ops import call


@takes_arrays
def paged_attention(  # noqa: PLR0913 (all that attention depends on)
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
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Return the attention of requests with up to 16 tokens in this step over their paged keys.

    query, out: [num_tokens, num_heads, head_dim] bf16, or fp16 with head_dim up to 128; head_dim:
    a multiple of 16 up to 256; key_pool, value_pool: [num_blocks, num_kv_heads, 16, head_dim] of
    that dtype, or of float8_e4m3fn beside bf16 queries of head_dim up to 128, with any strides but
    a dense last dimension; block_table [num_requests, max_blocks], seq_lens [num_requests],
    cu_seqlens_q [num_requests + 1]: int32; seq_lens counts the step's tokens too. A token attends
    to its own key and those before it, to the last ``window`` of them (0: all; -c: those of its own
    chunk, where chunks of c keys begin at multiples of c). ``soft_cap`` c turns a logit x into
    c tanh(x / c) (0: no cap); sinks [num_heads] float32 add one logit without
    a value to each head; keys are multiplied by k_scale, values by v_scale; scale and k_scale are
    above 0. lse [num_tokens, num_heads] float32, if given, receives the log-sum-exp of the logits.

    Rows of requests with more than 16 tokens are not written. A row without keys becomes 0, and its
    lse -inf. Nothing at or past a request's length is read. The keys and values before this step's
    tokens must be in the pools before plan_attention: they may be read while earlier kernels still
    run. With ``workspace``, its plan for this step (``plan_attention``) is used, and only ``out``
    is allocated. Raises ValueError on a wrong shape or number, TypeError on a wrong dtype.
    """
    a = checked(
        "paged_attention", out=out, lse=lse, query=query, key_pool=key_pool, value_pool=value_pool,
        block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, sinks=sinks,
        scale=scale, window=window, soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    if workspace is None:
        workspace = workspace_for(a)
        plan_attention(workspace, block_table, seq_lens, cu_seqlens_q, query.shape[0])
    if window not in workspace.items:
        raise ValueError(
            f"paged_attention: window {window} is not one of the workspace's: "
            f"{list(workspace.items)}"
        )
    launch_paged_attention(workspace, **vars(a))
    return a.out  # type: ignore[no-any-return]


def launch_paged_attention(workspace: Workspace, **arguments: Any) -> None:
    """Run paged_attention on checked arguments, with the plan of a workspace.

    It is for a layer whose shapes, dtypes and strides equal those of a call that check_attention
    has accepted. ``arguments``: all arguments of paged_attention by name, including ``out`` and
    ``lse``, which is an empty tensor if it is not wanted. Raises TypeError on a missing or unknown
    name.
    """
    call(
        PAGED_ATTENTION,
        items=workspace.items[arguments["window"]],
        partials=workspace.partials,
        mail=workspace.mail,
        arrivals=workspace.arrivals,
        **arguments,
    )


def plan_attention(
    workspace: Workspace,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    num_tokens: int,
) -> None:
    """Plan the work of a step on the device, with one launch for each window of a workspace.

    Neighbours in the batch whose first blocks are the same may read them together, which changes no
    bit of their results.
    Arguments as in paged_attention. Raises ValueError with the sizes if a step of these shapes may
    need more than the workspace has.
    """
    workspace.check(seq_lens.shape[0], num_tokens, block_table.shape[1])
    shared = workspace.shared[: seq_lens.shape[0]]
    call(SHARED_BLOCKS, shared=shared, block_table=block_table, seq_lens=seq_lens)
    for window, items in workspace.items.items():
        call(
            ATTENTION_PLAN,
            items=items,
            block_table=block_table,
            seq_lens=seq_lens,
            cu_seqlens_q=cu_seqlens_q,
            shared=shared,
            group=workspace.num_heads // workspace.num_kv_heads,
            window=window,
            **workspace.rule.arguments(),
        )
