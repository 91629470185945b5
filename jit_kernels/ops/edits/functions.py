"""The public functions that list the logit edits of rows and ban words."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.edits.spec import BAN_WORDS, TOKEN_EDITS
from kiln.jit_kernels.ops.sampling.functions import Edits
from kiln.jit_kernels.torch_ops import call


def token_edits(  # noqa: PLR0913 (what it reads and where)
    jobs: torch.Tensor,
    lengths: torch.Tensor,
    fixed_tokens: torch.Tensor,
    fixed_biases: torch.Tensor,
    *,
    token_pool: torch.Tensor,
    tables: torch.Tensor,
    count_table: torch.Tensor,
    room: int,
    block_size: int,
) -> Edits:
    """Return the edits of rows: their fixed tokens, and the tokens that their requests contain.

    jobs: [rows, 6] int32, the columns of JOB in kiln.jit_kernels.ops.edits.reference; ``room``
    elements are enough for all rows. lengths: [rows] int64, how many tokens the request of each row
    has; a row counts them if its job says so. fixed_tokens int32 and fixed_biases float32
    [num_fixed]; a row lists a token once. token_pool: [num_slots] int32, the token of each slot of
    the KV pool. tables: [max_requests, max_blocks] int32, the blocks of each request. count_table:
    [at_once, vocab] int32, zeros; so many rows are done at once. The order of a row's edits may
    differ from run to run.
    Source: kernel_sources/edits/token_edits.cu
    """
    device = jobs.device
    edits = Edits(
        torch.empty(len(jobs), 2, dtype=torch.int32, device=device),
        torch.empty(room, dtype=torch.int32, device=device),
        torch.empty(room, dtype=torch.int32, device=device),
        torch.empty(room, dtype=torch.float32, device=device),
    )
    call(
        TOKEN_EDITS,
        spans=edits.spans,
        tokens=edits.tokens,
        counts=edits.counts,
        biases=edits.biases,
        count_table=count_table,
        jobs=jobs,
        lengths=lengths,
        fixed_tokens=fixed_tokens,
        fixed_biases=fixed_biases,
        token_pool=token_pool,
        tables=tables,
        block_size=block_size,
    )
    return edits


def ban_words(
    mask: torch.Tensor,
    words: torch.Tensor,
    lengths: torch.Tensor,
    word_tokens: torch.Tensor,
    *,
    token_pool: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
) -> None:
    """Forbid the last token of each word whose other tokens are the last ones of its request.

    mask: [rows, ceil(vocab / 32)] int32 as of ``sample_tokens``, contiguous. words: [num_words, 4]
    int32, the columns of WORD in kiln.jit_kernels.ops.edits.reference; lengths: [rows] int64, how
    many tokens the request of each row has; word_tokens: [.] int32, the tokens of all words.
    token_pool and tables as of ``token_edits``.
    Source: kernel_sources/edits/ban_words.cu
    """
    call(
        BAN_WORDS,
        mask=mask,
        words=words,
        lengths=lengths,
        word_tokens=word_tokens,
        token_pool=token_pool,
        tables=tables,
        block_size=block_size,
    )
