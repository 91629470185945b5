"""The logit edits of rows, and the ban of words, in torch."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results

WORD = ("mask_row", "row", "first", "size")  # Word of ban_words.cu
JOB = ("row", "counts", "prompt", "first", "fixed", "num_fixed")  # Job of token_edits.cu


def token_edits_reference(a: Arguments) -> Results:
    """Return the outputs by name. What no row uses of them is what it was."""
    results = {name: getattr(a, name).clone() for name in ("spans", "tokens", "counts", "biases")}
    for r, job in enumerate(a.jobs.tolist()):
        row, is_counted, prompt, first, fixed, num_fixed = job
        length = int(a.lengths[r]) if is_counted else 0
        mine = slice(fixed, fixed + num_fixed)
        tokens, counts = _counted(_history(a, row, length), prompt)
        own = a.fixed_tokens[mine]
        others = ~torch.isin(tokens, own)
        parts = {
            "tokens": torch.cat([own, tokens[others]]),
            "counts": torch.cat([_looked_up(own, tokens, counts), counts[others]]),
            "biases": torch.nn.functional.pad(a.fixed_biases[mine], (0, int(others.sum()))),
        }
        end = first + len(parts["tokens"])
        for name, values in parts.items():
            results[name][first:end] = values
        results["spans"][r] = torch.tensor([first, end])
    return {**results, "count_table": a.count_table.clone()}


def ban_words_reference(a: Arguments) -> Results:
    """Return the new mask."""
    mask = a.mask.clone()
    for mask_row, row, first, size in a.words.tolist():
        length = int(a.lengths[mask_row])
        *before, last = a.word_tokens[first : first + size].tolist()
        begin = length - len(before)
        if begin >= 0 and _history(a, row, length)[begin:].tolist() == before:
            element = mask[mask_row, last // 32]
            element &= ~(1 << last % 32) if last % 32 < 31 else 2**31 - 1  # the sign bit
    return {"mask": mask}


def _history(a: Arguments, row: int, length: int) -> torch.Tensor:
    """Return the first tokens of a request, [length]."""
    blocks = a.tables[row, : -(-length // a.block_size)].long()
    tokens: torch.Tensor = a.token_pool.view(-1, a.block_size)[blocks].flatten()[:length]
    return tokens


def _counted(history: torch.Tensor, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct tokens of a history and how often each one occurs behind the prompt."""
    tokens, places = history.unique(return_inverse=True)
    counts = torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
    of_output = places[prompt:]
    return tokens, counts.index_add_(0, of_output, torch.ones_like(of_output, dtype=torch.int32))


def _looked_up(wanted: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the counts of some tokens; -1 for one that is not among ``tokens``, which ascend."""
    if not len(tokens):
        return torch.full_like(wanted, -1)
    places = torch.searchsorted(tokens, wanted).clamp(max=len(tokens) - 1)
    return torch.where(tokens[places] == wanted, counts[places], -1)
