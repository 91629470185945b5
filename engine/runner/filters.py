"""Which tokens a row may draw: top-k, then top-p of what is left, then min-p."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kiln.engine.sampling_params import SamplingParams


def filter_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return logits [num_rows, vocab_size] with -inf where a row's settings exclude a token.

    ``top_k`` keeps exactly that many, the lower token id first among equals; ``top_p`` keeps the
    most likely tokens until they hold that much of the mass that top_k left; ``min_p`` keeps
    those at least that likely relative to the likeliest. The likeliest token always stays.
    """
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        logits = _keep_top(logits, params)
    if any(p.min_p > 0 for p in params):
        share = torch.tensor([[p.min_p] for p in params], device=logits.device)
        floor = logits.amax(dim=-1, keepdim=True) + share.log()
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return logits


def _keep_top(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    size, device = logits.shape[-1], logits.device
    counts = [[p.top_k if p.top_k > 0 else size] for p in params]
    masses = torch.tensor([[p.top_p] for p in params], device=device)
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    out = torch.arange(size, device=device) >= torch.tensor(counts, device=device)
    likelihoods = values.masked_fill(out, float("-inf")).softmax(dim=-1)
    before = likelihoods.cumsum(dim=-1) - likelihoods  # mass of the likelier tokens
    out |= (before >= masses) & (masses < 1)  # a sum may round to 1: top_p 1 must keep all
    return logits.masked_fill(torch.empty_like(out).scatter_(1, order, out), float("-inf"))
