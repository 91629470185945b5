"""The public function that makes the inputs of a step."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.step.spec import STEP_INPUTS
from kiln.jit_kernels.torch_ops import call


def step_inputs(  # noqa: PLR0913 (every tensor that a step reads)
    *,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    sample_rows: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    block_table: torch.Tensor,
    tables: torch.Tensor,
    token_pool: torch.Tensor,
    message: torch.Tensor,
    sampled: torch.Tensor,
    drafts: torch.Tensor,
    rejected: torch.Tensor,
    block_size: int,
) -> None:
    """Write the inputs of a step from its message, and padding after them.

    message: [words] int32, contiguous, aligned to 8 bytes; see kiln.jit_kernels.ops.step.message.
    sampled: [max_samples] int32, the tokens that the step before sampled. drafts: [max_requests,
    max_drafts] int32, what may follow them. rejected: [max_requests] int32, the drafts of each row
    that the step before rejected; it becomes 0. tables: [max_requests, max_blocks] int32, the
    blocks of each row; the message's new blocks are added. token_pool: [num_slots] int32, the token
    of each slot of the KV pool; those of the step are added.

    token_ids, positions, slot_mapping: [tokens] int64, where a position is a row of the rotary
    table; cu_seqlens_q: [requests + 1], seq_lens:
    [requests], block_table: [requests, max_blocks], int32; sample_rows: [samples] int64; settings
    [samples, 6] float32 and keys [samples, 4] int64 as in sample_tokens. All but tables are
    contiguous. They must be large enough for the step; the caller checks that. Padding has slot -1
    and length 0, so attention and the store to the KV pool skip it.
    """
    call(
        STEP_INPUTS,
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        sample_rows=sample_rows,
        settings=settings,
        keys=keys,
        block_table=block_table,
        tables=tables,
        token_pool=token_pool,
        message=message,
        sampled=sampled,
        drafts=drafts,
        rejected=rejected,
        block_size=block_size,
    )
