"""Draw one token a row. A draw depends on the seed, the position and the row's logits alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kiln.engine.batch import SampledToken, ScheduledRequest
from kiln.engine.request import TokenLogprobs
from kiln.engine.runner.filters import filter_logits
from kiln.engine.runner.logprobs import token_logprobs
from kiln.engine.runner.noise import exponential_noise


def sample(logits: torch.Tensor, requests: Sequence[ScheduledRequest]) -> tuple[SampledToken, ...]:
    """Draw a token for each request from its row of logits [num_rows, vocab_size].

    Temperature 0 takes the likeliest token, the lowest id among equals. A row with NaN, +inf or
    nothing finite gives an error in its SampledToken; the others are not touched by it.
    """
    raw = logits.float()
    allowed = _ban(raw, requests)
    highest, greedy = allowed.max(dim=-1)
    drawn = greedy
    random = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if random:
        rows = torch.tensor(random, device=logits.device)
        picked = _draw(allowed.index_select(0, rows), [requests[row] for row in random])
        drawn = greedy.index_copy(0, rows, picked)
    # One copy to the host: float64 holds any token id and any float32 exactly.
    ids, tops = torch.stack((drawn.double(), highest.double())).tolist()
    errors = [_complaint(top) for top in tops]
    token_ids = [int(token) for token in ids]
    logprobs = _logprobs(raw, requests, token_ids, errors)
    return tuple(
        SampledToken(request.request_id, token, logprobs.get(row), error)
        for row, (request, token, error) in enumerate(zip(requests, token_ids, errors, strict=True))
    )


def _ban(logits: torch.Tensor, requests: Sequence[ScheduledRequest]) -> torch.Tensor:
    """Return logits with -inf at each request's banned tokens."""
    pairs = [(row, token) for row, r in enumerate(requests) for token in r.banned_token_ids]
    if not pairs:
        return logits
    rows, tokens = torch.tensor(pairs, device=logits.device).unbind(1)
    lowest = torch.tensor(float("-inf"), device=logits.device)
    return logits.index_put((rows, tokens), lowest)


def _draw(logits: torch.Tensor, requests: Sequence[ScheduledRequest]) -> torch.Tensor:
    """Draw from softmax(logits / temperature) under the filters: [num_rows] int64.

    The token whose exponential clock, running at its probability, rings first.
    """
    params = [request.params for request in requests]
    heat = torch.tensor([[p.temperature] for p in params], device=logits.device)
    kept = filter_logits(logits / heat, params)
    noise = exponential_noise(
        [request.seed for request in requests],
        [request.num_output_tokens for request in requests],
        logits.shape[-1],
        logits.device,
    )
    return (kept.double() - noise.log_()).argmax(dim=-1)


def _complaint(highest: float) -> str | None:
    """Say what is wrong with a row, by its highest logit; None where nothing is."""
    if math.isfinite(highest):
        return None
    what = {math.inf: "+inf", -math.inf: "no finite logit left"}.get(highest, "NaN")
    return f"the model's logits hold {what}: weights or dtype may not fit the model"


def _logprobs(
    raw: torch.Tensor,
    requests: Sequence[ScheduledRequest],
    token_ids: list[int],
    errors: list[str | None],
) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of the rows that asked for them and have no error."""
    wanted = {
        row: request.params.logprobs
        for row, request in enumerate(requests)
        if request.params.logprobs is not None and errors[row] is None
    }
    if not wanted:
        return {}
    rows = list(wanted)
    logits = raw.index_select(0, torch.tensor(rows, device=raw.device))
    found = token_logprobs(logits, [token_ids[row] for row in rows], list(wanted.values()))
    return dict(zip(rows, found, strict=True))
