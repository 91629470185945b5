"""The sampler in torch: what kernel_sources/sampling/sample_tokens.cu computes, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kiln.jit_kernels.references.sampling_noise import (
    arrivals,
    low_tokens,
    masses,
    noise_bits,
    row_states,
    weights,
)

NAN, INFINITE, NOTHING = 1, 2, 4  # what may be wrong with a row
LEAST_TEMPERATURE = 1e-5  # below, a row is greedy
_LOG2E = 1.44269504
_LOWEST = torch.finfo(torch.float32).min
_SLACK = 1.01  # more than the roundings of an estimated time
_MANY = 4096  # tokens of which most are left out of a race beforehand
_NEAR = 1 + 1e-4  # arrival times closer than this are told apart by their exact bits
_SHORT = 256  # how many of the largest logits nearly always hold a top-p

Largest = torch.return_types.topk | torch.return_types.sort  # values and indices, in order


@dataclass(frozen=True, slots=True)
class Cuts:
    """What any row of a batch asks for: its largest top-k, 0 for none; a top-p; a min-p."""

    largest_count: int
    by_mass: bool
    by_share: bool


@torch.no_grad()
def sample_reference(  # noqa: PLR0913 (the operator's own arguments)
    out_tokens: torch.Tensor,
    out_errors: torch.Tensor,
    out_cutoffs: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_ranks: torch.Tensor,
    out_top_tokens: torch.Tensor,
    out_top_logprobs: torch.Tensor,
    logits: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None,
    edit_starts: torch.Tensor | None,
    edit_tokens: torch.Tensor | None,
    edit_counts: torch.Tensor | None,
    edit_biases: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return the values of the seven outputs; see kiln.jit_kernels.ops.sampling.sample_tokens."""
    raw, settings = logits.float(), settings.float()
    count, width = len(raw), out_top_tokens.shape[1]
    results = list(_nothing(count, width, raw.device))
    if count == 0:
        return tuple(results)
    edited = raw
    if mask is not None or edit_starts is not None:
        edited = _edit(raw, settings, mask, edit_starts, edit_tokens, edit_counts, edit_biases)
    tops, tokens = edited.max(dim=-1)
    errors = _errors(tops if edited is raw else raw.amax(dim=-1), tops)
    fine = [row for row, error in enumerate(errors) if not error]
    if len(fine) == count:
        results[0], results[2] = tokens.int(), tops.clone()
    else:
        _put((results[0], results[2]), fine, (tokens, tops))
        results[1] = torch.tensor(errors, dtype=torch.int32, device=raw.device)
    heat, wanted = settings[:, :3].tolist(), keys[:, 2:].tolist()
    drawing = [row for row in fine if heat[row][0] >= LEAST_TEMPERATURE and wanted[row][0] != 1]
    if drawing:
        rows = _index(drawing, raw)
        size = raw.shape[1]
        counts = [wanted[row][0] for row in drawing if 0 < wanted[row][0] < size]
        cuts = Cuts(
            max(counts, default=0),
            any(heat[row][1] < 1 for row in drawing),
            any(heat[row][2] > -math.inf for row in drawing),
        )
        found = _draw(edited[rows], tops[rows], settings[rows], keys[rows], cuts)
        _put((results[0], results[2]), drawing, found)
    reported = [row for row in fine if wanted[row][1] >= 0]
    if reported:
        rows = _index(reported, raw)
        likely = _report(raw[rows], results[0][rows].long(), keys[rows, 3], width)
        _put(results[3:], reported, likely)
    return tuple(results)


def _index(rows: list[int], like: torch.Tensor) -> torch.Tensor | slice:
    """Return what picks some rows: of all, a view."""
    if len(rows) == len(like):
        return slice(None)
    return torch.tensor(rows, dtype=torch.int64, device=like.device)  # there may be no row


def _put(every: Sequence[torch.Tensor], rows: list[int], some: Sequence[torch.Tensor]) -> None:
    """Write the values of some rows."""
    for to, values in zip(every, some, strict=True):
        index = _index(rows, to)
        to[index] = (values if len(values) == len(rows) else values[index]).to(to.dtype)


def _nothing(rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the results of rows that all failed, and asked for nothing."""
    integers = torch.zeros(3, rows, dtype=torch.int32, device=device)
    cutoffs, logprobs = torch.zeros(2, rows, device=device)
    top_tokens = torch.full((rows, width), -1, dtype=torch.int32, device=device)
    top_logprobs = torch.full((rows, width), float("-inf"), device=device)
    tokens, errors, ranks = integers
    return tokens, errors, cutoffs, logprobs, ranks, top_tokens, top_logprobs


def _errors(raw_tops: torch.Tensor, tops: torch.Tensor) -> list[int]:
    """Return what is wrong with each row, by its largest logits, NaN where there is one."""
    errors = []
    for raw, top in zip(raw_tops.tolist(), tops.tolist(), strict=True):
        infinite = math.inf in (raw, top)
        nothing = NOTHING if top == -math.inf else 0
        errors.append(NAN if raw != raw else INFINITE if infinite else nothing)
    return errors


def _edit(
    raw: torch.Tensor,
    settings: torch.Tensor,
    mask: torch.Tensor | None,
    starts: torch.Tensor | None,
    tokens: torch.Tensor | None,
    counts: torch.Tensor | None,
    biases: torch.Tensor | None,
) -> torch.Tensor:
    """Apply a mask, then a bias, then the repetition, frequency and presence penalties."""
    lowest = float("-inf")
    if mask is not None:
        bits = torch.arange(32, dtype=torch.int32, device=raw.device)
        allowed = (mask.unsqueeze(-1) >> bits).bitwise_and_(1).bool().flatten(1)
        allowed = allowed[:, : raw.shape[1]]
    masked = raw if mask is None else raw.masked_fill(~allowed, lowest)
    if starts is None or tokens is None or counts is None or biases is None or not len(tokens):
        return masked
    index = torch.arange(len(raw), device=raw.device)
    rows = index.repeat_interleave(starts.diff().long(), output_size=len(tokens))
    columns = tokens.long()
    repetition, frequency, presence = settings[rows, 3:].unbind(1)
    x = raw[rows, columns] + biases.float()
    x = torch.where(counts < 0, x, torch.where(x > 0, x / repetition, x * repetition))
    x = torch.where(counts > 0, x - frequency * counts - presence, x)
    if mask is not None:
        x = x.masked_fill(~allowed[rows, columns], lowest)
    return masked.index_put((rows, columns), x)


def _draw(
    logits: torch.Tensor, tops: torch.Tensor, settings: torch.Tensor, keys: torch.Tensor, cuts: Cuts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token and the smallest logit that might have been drawn, for each row."""
    top = tops.unsqueeze(1)
    temperature, top_p, log_min_p = settings[:, :3].unbind(1)
    scale = torch.div(temperature.new_tensor(_LOG2E), temperature.clamp(max=1e30)).unsqueeze(1)
    weight = None
    cutoff, short = _cut_count(logits, keys[:, 2], cuts)
    if short is not None and cuts.by_mass:
        weight = weights(logits, top, scale)
        cutoff, short = _cut_mass(logits, weight, top_p, keys[:, 2], cutoff, short)
    if cuts.by_share:
        cutoff = torch.maximum(cutoff, tops + temperature * log_min_p)
    least = cutoff.unsqueeze(1)
    columns = None
    if short is not None:
        width = int((logits >= least).sum(-1).max())
        if width <= short.values.shape[1]:
            columns = short.indices[:, :width]
    return _race(logits, columns, weight, least, tops, scale, keys), cutoff


def _cut_count(
    logits: torch.Tensor, top_k: torch.Tensor, cuts: Cuts
) -> tuple[torch.Tensor, Largest | None]:
    """Return the least logit that top-k leaves, and the largest logits if anything needs them."""
    size = logits.shape[1]
    cutoff = logits.new_full((len(logits),), _LOWEST)
    if not cuts.largest_count and not cuts.by_mass:
        return cutoff, None
    wanted = max(cuts.largest_count, _SHORT if cuts.by_mass else 1)
    short = logits.topk(min(wanted, size), dim=-1)
    if cuts.largest_count:
        by_count = (top_k > 0) & (top_k < size)
        last = top_k.clamp(1, short.values.shape[1]).unsqueeze(1) - 1
        kth = short.values.gather(1, last).squeeze(1).clamp_(min=_LOWEST)
        cutoff = torch.where(by_count, kth, cutoff)
    return cutoff, short


def _cut_mass(
    logits: torch.Tensor,
    weight: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    cutoff: torch.Tensor,
    short: Largest,
) -> tuple[torch.Tensor, Largest]:
    """Return the least logit that top-p leaves of what top-k left, and the largest logits."""
    by_count, least = (top_k > 0) & (top_k < logits.shape[1]), cutoff.unsqueeze(1)
    mass = masses(weight)
    total = mass.sum(-1)
    if by_count.any():
        left = mass.masked_fill(logits < least, 0).sum(-1)
        total = torch.where(by_count, left, total)
    limit = (top_p.double() * total.double()).long().clamp_(min=1)
    ordered = mass.gather(1, short.indices)
    if ordered.shape[1] < logits.shape[1] and ((top_p < 1) & (ordered.sum(-1) < limit)).any():
        short = logits.sort(dim=-1, descending=True)
        ordered = mass.gather(1, short.indices)
    kept = short.values >= least
    ordered.mul_(kept)
    through = ordered.cumsum(-1)
    inside = (through - ordered < limit.unsqueeze(1)).logical_and_(kept)
    last = inside.sum(-1, keepdim=True) - 1
    nucleus = short.values.gather(1, last).squeeze(1)
    reached = (top_p < 1) & (through[:, -1] >= limit)
    return torch.where(reached, nucleus, cutoff), short


def _race(
    logits: torch.Tensor,
    columns: torch.Tensor | None,
    weight: torch.Tensor | None,
    least: torch.Tensor,
    tops: torch.Tensor,
    scale: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Return for each row the token, of those at least its cutoff, that arrives first.

    Among ``columns`` [num_rows, count] or all. In float64 first; only what arrives at nearly the
    same time is told apart bit by bit.
    """
    states, size = row_states(keys[:, 0], keys[:, 1]), logits.shape[1]
    if columns is None and size > _MANY:
        columns = _who_may_win(states, logits, least, tops, scale)
    low = low_tokens(states, size, columns)
    values = logits if columns is None else logits.gather(1, columns)
    if weight is not None:
        slowness = (weight if columns is None else weight.gather(1, columns)).reciprocal()
    else:
        slowness = _slowness(values, tops, scale)
    every = torch.arange(size, device=logits.device) if columns is None else columns
    bits = noise_bits(states.unsqueeze(1), every, low)
    times = bits.double().add_(0.5).mul_(-(2.0**-52)).log1p_().mul_(slowness).neg_()
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


def _who_may_win(
    states: torch.Tensor,
    logits: torch.Tensor,
    least: torch.Tensor,
    tops: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Return the columns [num_rows, count] of tokens that may win, and of some others.

    A number below 2^-8 may, and any other only before the soonest of those could arrive at the
    latest.
    """
    low = low_tokens(states, logits.shape[1])
    slowness = _slowness(logits, tops, scale).masked_fill_(logits < least, math.inf)
    latest = slowness.masked_fill(~low, math.inf).amin(-1, keepdim=True).mul_(_SLACK)
    may_win = (slowness <= latest).logical_or_(low)
    count = int(may_win.sum(-1).max())
    return may_win.byte().topk(count, dim=-1, sorted=False).indices


def _slowness(values: torch.Tensor, tops: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values.sub(tops.unsqueeze(1)).mul_(scale).clamp_(min=-100.0).neg_().exp2_()


def _report(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: torch.Tensor, width: int
) -> tuple[torch.Tensor, ...]:
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
        there = asked.logical_and_(values >= _LOWEST)
        top_tokens[:, :found] = torch.where(there, indices, -1)
        top_logprobs[:, :found] = torch.where(there, values - shift, -math.inf)
    return (chosen - shift).squeeze(1), ranks, top_tokens, top_logprobs


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logits of each row and their tokens, lower ones first among equals."""
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
