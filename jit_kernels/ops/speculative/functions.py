"""The public functions that propose drafts and verify them."""

from __future__ import annotations

import torch

from kiln.jit_kernels.ops.speculative.spec import MAX_LOOKUP, PROPOSE_NGRAM, VERIFY_CHAIN
from kiln.jit_kernels.torch_ops import call


def verify_chain(
    rejected: torch.Tensor, message: torch.Tensor, token_ids: torch.Tensor, sampled: torch.Tensor
) -> None:
    """Write how many of its drafts each row of a step rejects: [max_requests] int32.

    message, token_ids: of the step, as in ``step_inputs``; sampled: [max_samples] int32, what it
    has sampled. The drafts of a request are its last tokens in the step, one less than its samples.
    Rows without drafts are left alone.
    Source: kernel_sources/speculative/verify_chain.cu; https://arxiv.org/abs/2211.17192
    """
    call(VERIFY_CHAIN, rejected=rejected, message=message, token_ids=token_ids, sampled=sampled)


def propose_ngram(  # noqa: PLR0913 (what a step has)
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    *,
    message: torch.Tensor,
    seq_lens: torch.Tensor,
    rejected: torch.Tensor,
    sampled: torch.Tensor,
    token_pool: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    prompt_lookup_max: int,
    prompt_lookup_min: int,
) -> None:
    """Write drafts behind the newest token of each row of a step: what followed it earlier.

    A row's last n tokens are looked up among its earlier tokens, for the largest n from
    ``prompt_lookup_max`` down to ``prompt_lookup_min`` for which there is a match. The last match
    counts. Its drafts are the tokens behind it, and where they reach the end of the row's tokens,
    the drafts go on as if these repeated.

    drafts: [max_requests, max_drafts] int32; a row gets as many drafts as it wants. num_drafts:
    [max_requests] int32; the same number, or 0 without a match. Then the drafts are copies of the
    newest token, so that a step that computes them reads tokens. Rows that are not in the step, and
    the drafts of rows that want none, are left alone.

    All others are of the step that has just sampled and verified its drafts, as in ``step_inputs``
    and ``verify_chain``; seq_lens: [requests] int32, at least the step's requests. message[WANTED]
    is the place in the message of the numbers of drafts that the requests want, [requests] int32,
    each at most max_drafts; 0: no request wants any. A request that samples nothing gets none.

    Raises ValueError unless 1 <= prompt_lookup_min <= prompt_lookup_max <= MAX_LOOKUP.
    Source: kernel_sources/speculative/propose_ngram.cu; prompt lookup decoding, as vLLM's method
    "ngram", which takes the first match
    """
    if not 1 <= prompt_lookup_min <= prompt_lookup_max <= MAX_LOOKUP:
        raise ValueError(
            f"prompt_lookup_min={prompt_lookup_min} and prompt_lookup_max={prompt_lookup_max}: "
            f"want 1 <= prompt_lookup_min <= prompt_lookup_max <= {MAX_LOOKUP}"
        )
    call(
        PROPOSE_NGRAM,
        drafts=drafts,
        num_drafts=num_drafts,
        message=message,
        seq_lens=seq_lens,
        rejected=rejected,
        sampled=sampled,
        token_pool=token_pool,
        tables=tables,
        block_size=block_size,
        prompt_lookup_max=prompt_lookup_max,
        prompt_lookup_min=prompt_lookup_min,
    )
