"""Log-probabilities of drawn tokens and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kiln.engine.request import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return one TokenLogprobs a row of logits [num_rows, vocab_size] float32, unfiltered.

    ``num_top`` is how many of the likeliest tokens each row wants. A token's rank is one more
    than the number of tokens that are likelier.
    """
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    drawn = logprobs.gather(1, ids)
    ranks = (logprobs > drawn).sum(dim=-1) + 1
    values, tops = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    rows = zip(
        token_ids,
        drawn.squeeze(1).tolist(),
        ranks.tolist(),
        tops.tolist(),
        values.tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(token, value, rank, _top(top, likely, wanted))
        for token, value, rank, top, likely, wanted in rows
    ]


def _top(ids: list[int], values: list[float], wanted: int) -> list[tuple[int, float, int]]:
    pairs = zip(ids[:wanted], values[:wanted], strict=True)
    return [(token, value, rank) for rank, (token, value) in enumerate(pairs, start=1)]
