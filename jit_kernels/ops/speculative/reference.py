"""Proposing and verifying drafts in torch."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results
from kiln.jit_kernels.ops.step.message import WANTED
from kiln.jit_kernels.ops.step.reference import fields_of, words_of


def verify_chain_reference(a: Arguments) -> Results:
    """Return how many drafts each row rejects."""
    rejected = a.rejected.clone()
    fields = fields_of(words_of(a.message))
    names = ("row", "first", "count", "sample", "num_samples")
    columns = (fields[name].tolist() for name in names)
    for row, first, count, sample, samples in zip(*columns, strict=True):
        if samples > 1:
            drafts = a.token_ids[first + count - samples + 1 : first + count]
            stands = a.sampled[sample : sample + samples - 1] == drafts
            rejected[row] = samples - 1 - int(stands.int().cumprod(0).sum())
    return {"rejected": rejected}


def propose_ngram_reference(a: Arguments) -> Results:
    """Return the drafts of all rows, and how many each has."""
    drafts, num_drafts = a.drafts.clone(), a.num_drafts.clone()
    fields, at = fields_of(words_of(a.message)), int(a.message[WANTED])
    rows, samples = fields["row"], fields["num_samples"]
    if not at or not len(rows):
        return {"drafts": drafts, "num_drafts": num_drafts.index_fill(0, rows, 0)}
    wanted = a.message[at : at + len(rows)] * (samples > 0)
    rejected = a.rejected[rows]
    last = (a.seq_lens[: len(rows)] - rejected).long()  # the place of the newest token
    newest = a.sampled[fields["sample"] + samples - 1 - rejected]
    history = _histories(a, rows, last, newest)
    behind = _matched(history, last, a.prompt_lookup_max, a.prompt_lookup_min)
    num_drafts[rows] = wanted * (behind > 0)
    behind = torch.where(behind > 0, behind, last)[:, None]
    offset = torch.arange(drafts.shape[1], device=drafts.device)
    own = history.gather(1, behind + offset % (last[:, None] + 1 - behind))
    drafts[rows] = torch.where(offset < wanted[:, None], own, drafts[rows])
    return {"drafts": drafts, "num_drafts": num_drafts}


def _histories(
    a: Arguments, rows: torch.Tensor, last: torch.Tensor, newest: torch.Tensor
) -> torch.Tensor:
    """Return the tokens of rows, the newest one at ``last``, and others behind it, [rows, .]."""
    blocks = a.tables[rows, : int(last.max()) // a.block_size + 1].long()
    tokens: torch.Tensor = a.token_pool.view(-1, a.block_size)[blocks].flatten(1)
    return tokens.scatter_(1, last[:, None], newest[:, None])


def _matched(
    history: torch.Tensor, last: torch.Tensor, longest: int, shortest: int
) -> torch.Tensor:
    """Return the places behind the last of the longest matches, [rows]; 0: there is none."""
    width = history.shape[1]
    is_earlier = torch.arange(width, device=last.device) < last[:, None]
    same = (history == history.gather(1, last[:, None])) & is_earlier
    row, end = same.nonzero().unbind(1)  # ``end``: the last token of what may be a match
    before = torch.arange(longest, device=last.device)
    ours, theirs = ((one[:, None] - before).clamp(min=0) for one in (last[row], end))
    equal = (history[row[:, None], ours] == history[row[:, None], theirs]) & (
        before <= end[:, None]
    )
    length = equal.long().cumprod(1).sum(1)
    # One number for both: that of a longer match is larger, then that of a later one.
    key = (length * width + end + 1) * (length >= shortest)
    return torch.zeros_like(last).scatter_reduce(0, row, key, "amax") % width
