"""Integers with a scale and a zero point for each group of inputs, and words of 32 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch

PACKERS = []  # those of awq and gptq


class Integers(NamedTuple):
    """codes [outputs, inputs], scales and zeros [outputs, groups], and the weight in float64."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    weight: torch.Tensor


def quantise(
    weight: torch.Tensor, group_of: torch.Tensor, zeros: torch.Tensor, bits: int
) -> Integers:
    """Round a weight [outputs, inputs] to the nearest codes, with scales in float16."""
    most = 2**bits - 1
    scales = torch.empty(zeros.shape, dtype=torch.float16)
    codes = torch.empty(weight.shape, dtype=torch.int64)
    exact = torch.empty_like(weight)
    for group in range(zeros.shape[1]):
        own, zero = group_of == group, zeros[:, group, None]
        reach = weight[:, own].abs().amax(1)
        scales[:, group] = reach / torch.maximum(zeros[:, group], most - zeros[:, group])
        scale = scales[:, group, None].double()
        codes[:, own] = (weight[:, own] / scale + zero).round().long().clamp(0, most)
        exact[:, own] = (codes[:, own] - zero) * scale
    return Integers(codes, scales, zeros, exact)


def zeros_of(
    outputs: int, groups: int, least: int, most: int, generator: torch.Generator
) -> torch.Tensor:
    """Return zero points that are all of ``least`` to ``most``, if there are as many."""
    count = outputs * groups
    every = torch.arange(max(count, most - least + 1)) % (most - least + 1) + least
    return every[torch.randperm(len(every), generator=generator)][:count].view(outputs, groups)


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack codes [rows, n] into int32 [rows, n * bits / 32]: code ``order[j]`` at place j."""
    per_word = 32 // bits
    parts = codes.long().view(len(codes), -1, per_word)[..., list(order or range(per_word))]
    packed = sum(parts[..., place] << place * bits for place in range(per_word))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
