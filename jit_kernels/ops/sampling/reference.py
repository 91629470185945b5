"""The sampler in torch: what kernel_sources/sampling/sample_tokens.cu computes, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.sampling.noise import (
    arrivals,
    low_tokens,
    masses,
    noise_bits,
    row_states,
    weights,
)

SETTINGS = ("temperature", "top_p", "log_min_p", "repetition", "frequency", "presence")  # columns
KEYS = ("seed", "position", "top_k", "num_logprobs")  # columns
NAN, INFINITE, NOTHING = 1, 2, 4  # errors of a row: a NaN logit, a +inf logit, none above -inf
LEAST_TEMPERATURE = 1e-5  # below, a row is greedy
_LOG2E = 1.44269504
_LOWEST = torch.finfo(torch.float32).min
_SLACK = 1.01  # margin for the rounding errors of an estimated arrival time
_MANY = 4096  # vocabularies above this are first reduced to the tokens that can win
_NEAR = 1 + 1e-4  # arrival times within this ratio are compared by their exact bits
_TOP_P_SIZE = 256  # top-p usually keeps fewer tokens than this; if not, the row is sorted

Largest = torch.return_types.topk | torch.return_types.sort  # values and indices, in order


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters that at least one row of a batch uses. ``largest_top_k`` is 0 for no top-k."""

    largest_top_k: int
    top_p: bool
    min_p: bool


@torch.no_grad()
def sample_reference(a: Arguments) -> Results:
    """Return the outputs by name; see kiln.jit_kernels.ops.sampling.functions.sample_tokens."""
    raw, settings = a.logits.float(), a.settings.float()
    count, width = len(raw), a.top_tokens.shape[1]
    results = no_results(count, width, raw.device)
    if count == 0:
        return results
    edited = raw
    if a.mask is not None or a.edit_spans is not None:
        edited = _edit(raw, a)
    tops, tokens = edited.max(dim=-1)
    errors = _errors(tops if edited is raw else raw.amax(dim=-1), tops)
    valid = [row for row, error in enumerate(errors) if not error]
    _put(results, valid, {"tokens": tokens, "cutoffs": tops})
    if len(valid) < count:
        results["errors"] = torch.tensor(errors, dtype=torch.int32, device=raw.device)
    filters, wanted = settings[:, :3].tolist(), a.keys[:, 2:].tolist()
    drawn = [row for row in valid if filters[row][0] >= LEAST_TEMPERATURE and wanted[row][0] != 1]
    if drawn:
        rows = _index(drawn, raw)
        size = raw.shape[1]
        used = Filters(
            max((wanted[row][0] for row in drawn if 0 < wanted[row][0] < size), default=0),
            any(filters[row][1] < 1 for row in drawn),
            any(filters[row][2] > -math.inf for row in drawn),
        )
        found = _draw(edited[rows], tops[rows], settings[rows], a.keys[rows], used)
        _put(results, drawn, found)
    reported = [row for row in valid if wanted[row][1] >= 0]
    if reported:
        rows = _index(reported, raw)
        chosen = results["tokens"][rows].long()
        _put(results, reported, _report(raw[rows], chosen, a.keys[rows, 3], width))
    return results


def no_results(rows: int, width: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the outputs of rows that have an error."""
    return {
        "tokens": torch.zeros(rows, dtype=torch.int32, device=device),
        "errors": torch.zeros(rows, dtype=torch.int32, device=device),
        "cutoffs": torch.zeros(rows, device=device),
        "logprobs": torch.zeros(rows, device=device),
        "ranks": torch.zeros(rows, dtype=torch.int32, device=device),
        "top_tokens": torch.full((rows, width), -1, dtype=torch.int32, device=device),
        "top_logprobs": torch.full((rows, width), -math.inf, device=device),
    }


def _index(rows: list[int], like: torch.Tensor) -> torch.Tensor | slice:
    """Return an index that selects some rows; for all rows one that makes a view."""
    if len(rows) == len(like):
        return slice(None)
    return torch.tensor(rows, dtype=torch.int64, device=like.device)  # there may be no row


def _put(
    results: dict[str, torch.Tensor], rows: list[int], values: Mapping[str, torch.Tensor]
) -> None:
    """Write values to some rows. They are the values of these rows, or of all rows."""
    for name, one in values.items():
        to = results[name]
        index = _index(rows, to)
        to[index] = (one if len(one) == len(rows) else one[index]).to(to.dtype)


def _errors(raw_tops: torch.Tensor, tops: torch.Tensor) -> list[int]:
    """Return the error of each row from its largest logit before and after edits.

    The maximum of a row with a NaN is NaN.
    """
    errors = []
    for raw, top in zip(raw_tops.tolist(), tops.tolist(), strict=True):
        infinite = math.inf in (raw, top)
        nothing = NOTHING if top == -math.inf else 0
        errors.append(NAN if raw != raw else INFINITE if infinite else nothing)
    return errors


def _edit(raw: torch.Tensor, a: Arguments) -> torch.Tensor:
    """Apply mask, bias, and the repetition, frequency and presence penalties to raw logits."""
    lowest = float("-inf")
    allowed = None if a.mask is None else _allowed(a.mask, raw.shape[1])
    masked = raw if allowed is None else raw.masked_fill(~allowed, lowest)
    if a.edit_spans is None or not len(a.edit_tokens):
        return masked
    first, end = a.edit_spans.long().unbind(1)
    lengths = end - first
    rows = torch.arange(len(raw), device=raw.device).repeat_interleave(lengths)
    places = (
        torch.arange(len(rows), device=raw.device) + (first - lengths.cumsum(0) + lengths)[rows]
    )
    columns, counts = a.edit_tokens[places].long(), a.edit_counts[places]
    repetition, frequency, presence = a.settings.float()[rows, 3:].unbind(1)
    x = raw[rows, columns] + a.edit_biases[places].float()
    x = torch.where(counts < 0, x, torch.where(x > 0, x / repetition, x * repetition))
    x = torch.where(counts > 0, x - frequency * counts - presence, x)
    if allowed is not None:
        x = x.masked_fill(~allowed[rows, columns], lowest)
    return masked.index_put((rows, columns), x)


def _allowed(mask: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return a mask of one bit per token as bool [num_rows, vocab]."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (mask.unsqueeze(-1) >> bits).bitwise_and_(1).bool().flatten(1)[:, :vocab]


def _draw(
    logits: torch.Tensor,
    tops: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    used: Filters,
) -> dict[str, torch.Tensor]:
    """Return a token and the cutoff, the smallest logit that may be drawn, for each row."""
    top = tops.unsqueeze(1)
    temperature, top_p, log_min_p = settings[:, :3].unbind(1)
    scale = torch.div(temperature.new_tensor(_LOG2E), temperature.clamp(max=1e30)).unsqueeze(1)
    weight = None
    cutoff, largest = _top_k_cutoff(logits, keys[:, 2], used)
    if largest is not None and used.top_p:
        weight = weights(logits, top, scale)
        cutoff, largest = _top_p_cutoff(logits, weight, top_p, keys[:, 2], cutoff, largest)
    if used.min_p:
        cutoff = torch.maximum(cutoff, tops + temperature * log_min_p)
    least = cutoff.unsqueeze(1)
    columns = None
    if largest is not None:
        width = int((logits >= least).sum(-1).max())
        if width <= largest.values.shape[1]:
            columns = largest.indices[:, :width]
    tokens = _race(logits, columns, weight, least, tops, scale, keys)
    return {"tokens": tokens, "cutoffs": cutoff}


def _top_k_cutoff(
    logits: torch.Tensor, top_k: torch.Tensor, used: Filters
) -> tuple[torch.Tensor, Largest | None]:
    """Return the smallest logit that top-k keeps, and the largest logits if a filter needs them."""
    size = logits.shape[1]
    cutoff = logits.new_full((len(logits),), _LOWEST)
    if not used.largest_top_k and not used.top_p:
        return cutoff, None
    wanted = max(used.largest_top_k, _TOP_P_SIZE if used.top_p else 1)
    largest = logits.topk(min(wanted, size), dim=-1)
    if used.largest_top_k:
        limited = (top_k > 0) & (top_k < size)
        last = top_k.clamp(1, largest.values.shape[1]).unsqueeze(1) - 1
        kth = largest.values.gather(1, last).squeeze(1).clamp_(min=_LOWEST)
        cutoff = torch.where(limited, kth, cutoff)
    return cutoff, largest


def _top_p_cutoff(
    logits: torch.Tensor,
    weight: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    cutoff: torch.Tensor,
    largest: Largest,
) -> tuple[torch.Tensor, Largest]:
    """Return the smallest logit that top-p keeps of those that top-k kept; the largest logits."""
    limited, least = (top_k > 0) & (top_k < logits.shape[1]), cutoff.unsqueeze(1)
    mass = masses(weight)
    total = mass.sum(-1)
    if limited.any():
        kept_mass = mass.masked_fill(logits < least, 0).sum(-1)
        total = torch.where(limited, kept_mass, total)
    limit = (top_p.double() * total.double()).long().clamp_(min=1)
    ordered = mass.gather(1, largest.indices)
    if ordered.shape[1] < logits.shape[1] and ((top_p < 1) & (ordered.sum(-1) < limit)).any():
        largest = logits.sort(dim=-1, descending=True)
        ordered = mass.gather(1, largest.indices)
    kept = largest.values >= least
    ordered.mul_(kept)
    prefix_sum = ordered.cumsum(-1)
    inside = (prefix_sum - ordered < limit.unsqueeze(1)).logical_and_(kept)
    last = inside.sum(-1, keepdim=True) - 1
    nucleus = largest.values.gather(1, last).squeeze(1)
    reached = (top_p < 1) & (prefix_sum[:, -1] >= limit)
    return torch.where(reached, nucleus, cutoff), largest


def _race(
    logits: torch.Tensor,
    columns: torch.Tensor | None,
    weight: torch.Tensor | None,
    least: torch.Tensor,
    tops: torch.Tensor,
    scale: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Return for each row the token with the earliest arrival, of those at least its cutoff.

    Only tokens in ``columns`` [num_rows, count] take part, or all if it is None. Arrival times are
    first computed in float64; those close to the earliest are then computed with the kernel's bits.
    """
    states, size = row_states(keys[:, 0], keys[:, 1]), logits.shape[1]
    if columns is None and size > _MANY:
        columns = _candidates(states, logits, least, tops, scale)
    low = low_tokens(states, size, columns)
    values = logits if columns is None else logits.gather(1, columns)
    if weight is not None:
        inverse = (weight if columns is None else weight.gather(1, columns)).reciprocal()
    else:
        inverse = _inverse_weights(values, tops, scale)
    every = torch.arange(size, device=logits.device) if columns is None else columns
    bits = noise_bits(states.unsqueeze(1), every, low)
    times = bits.double().add_(0.5).mul_(-(2.0**-52)).log1p_().mul_(inverse).neg_()
    times.masked_fill_(values < least, math.inf)
    near = times <= times.amin(-1, keepdim=True).mul_(_NEAR)
    rows, places = near.nonzero(as_tuple=True)
    tokens = places if columns is None else columns[rows, places]
    if len(rows) == len(logits):
        return tokens
    exact = arrivals(bits[rows, places], weights(logits[rows, tokens], tops[rows], scale[rows, 0]))
    first = exact.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(tokens)
    winners = torch.full_like(states, torch.iinfo(torch.int64).max)
    return winners.scatter_reduce_(0, rows, first, "amin").bitwise_and_(0xFFFFFFFF)


def _candidates(
    states: torch.Tensor,
    logits: torch.Tensor,
    least: torch.Tensor,
    tops: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Return columns [num_rows, count] that include every token that can win the race.

    These are the tokens with a low random number, below 2^-8. Any other token can win only if it
    can arrive before the latest possible arrival of a token with a low number.
    """
    low = low_tokens(states, logits.shape[1])
    inverse = _inverse_weights(logits, tops, scale).masked_fill_(logits < least, math.inf)
    latest = inverse.masked_fill(~low, math.inf).amin(-1, keepdim=True).mul_(_SLACK)
    may_win = (inverse <= latest).logical_or_(low)
    count = int(may_win.sum(-1).max())
    return may_win.byte().topk(count, dim=-1, sorted=False).indices


def _inverse_weights(values: torch.Tensor, tops: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the reciprocals of the weights of some logits, approximately."""
    return values.sub(tops.unsqueeze(1)).mul_(scale).clamp_(min=-100.0).neg_().exp2_()


def _report(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: torch.Tensor, width: int
) -> dict[str, torch.Tensor]:
    """Return log-probability and rank of tokens, and the likeliest tokens, lower ids first."""
    shift = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > chosen).sum(-1).add_(1)
    top_tokens = torch.full((len(logits), width), -1, device=logits.device)
    top_logprobs = logits.new_full((len(logits), width), -math.inf)
    found = min(width, logits.shape[1])
    if found:
        values, indices = _largest(logits, found)
        asked = torch.arange(found, device=logits.device) < num_top.unsqueeze(1)
        reported = asked.logical_and_(values >= _LOWEST)
        top_tokens[:, :found] = torch.where(reported, indices, -1)
        top_logprobs[:, :found] = torch.where(reported, values - shift, -math.inf)
    return {
        "logprobs": (chosen - shift).squeeze(1),
        "ranks": ranks,
        "top_tokens": top_tokens,
        "top_logprobs": top_logprobs,
    }


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logits of each row and their tokens; of equal logits, lower ids first."""
    values, indices = logits.topk(count, dim=-1)
    equal = (values[:, 1:] == values[:, :-1]).any()
    if not equal and int((logits >= values[:, -1:]).sum()) == values.numel():
        return values, indices
    bits = (logits + 0.0).view(torch.int32)  # ordered as the logits are, -0 as 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    places = torch.arange(logits.shape[1], device=logits.device)
    largest = (ordered | (0xFFFFFFFF - places)).topk(count, dim=-1).values
    indices = 0xFFFFFFFF - (largest & 0xFFFFFFFF)
    return logits.gather(1, indices), indices
