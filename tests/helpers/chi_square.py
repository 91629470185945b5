"""Whether counts of drawn tokens fit their probabilities."""

from __future__ import annotations

import torch


def chi_square(counts, probabilities):
    """The p-value of counts; tokens of probability 0 must not occur."""
    assert (counts[probabilities == 0] == 0).all()
    there = probabilities > 0
    expected = counts.sum() * probabilities[there]
    statistic = ((counts[there] - expected) ** 2 / expected).sum()
    half = torch.tensor((there.sum() - 1) / 2.0, dtype=torch.float64)
    return torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)).item()
