"""What the formats of integers with a scale per group of inputs share."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from kiln.engine.layers.group_weight import Group4Weight, Group8Weight
from kiln.engine.models.scheme import Part


def group_weight(
    part: Part,
    bits: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None = None,
) -> Group8Weight:
    """Return the rank's inputs of codes that were unpacked; the outputs are already the rank's.

    codes: [out, in] uint8, of all inputs; scales: [out, groups] float32; zeros: [out, groups]
    int16 or None; group_of: [in] int32 or None, if the groups are of neighbours. A rank that has a
    part of a group gets smaller groups with the same scales, so that every share can be cut.
    """
    whole, groups, share = codes.shape[1], scales.shape[1], part.inputs
    places = torch.arange(whole, device=codes.device)
    if group_of is not None and torch.equal(group_of, (places // (whole // groups)).int()):
        group_of = None  # many files list the groups in their order
    if group_of is None:
        size = whole // groups
        own = math.gcd(size, share.start, share.size, share.room)
        chosen = places[share.place][::own] // size
        scales = scales[:, chosen]
        zeros = None if zeros is None else zeros[:, chosen]
        more = (share.room - share.size) // own
    else:
        more = int(share.room > share.size)
        behind = torch.full((share.room - share.size,), groups, device=codes.device)
        group_of = torch.cat((group_of[share.place], behind)).int()
    if more:  # inputs behind the share: a scale of 0 makes their weights 0
        scales = F.pad(scales, (0, more))
        zeros = None if zeros is None else F.pad(zeros, (0, more))
    codes = F.pad(codes[:, share.place], (0, share.room - share.size))
    return packed(bits, codes, scales.contiguous(), zeros, group_of)


def packed(
    bits: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None,
) -> Group8Weight:
    """Return the weights of codes [out, in] of one byte each, two of 4 bits in a byte."""
    if bits == 4 and codes.shape[1] % 2 == 0:
        return Group4Weight(codes[:, ::2] | codes[:, 1::2] << 4, scales, zeros, group_of)
    if bits == 4 and zeros is None:
        zeros = torch.full_like(scales, 8, dtype=torch.int16)
    return Group8Weight(codes.contiguous(), scales, zeros, group_of)


def quantized_by_group(
    values: torch.Tensor, bits: int, group_size: int, asymmetric: bool
) -> Group8Weight:
    """Return weights [out, in] rounded to integers, for random weights.

    ``group_size``: of inputs; where it does not divide them, the largest divisor of both.
    """
    outputs, inputs = values.shape
    size = math.gcd(group_size or inputs, inputs)
    groups = values.float().view(outputs, -1, size)
    half, most = 2 ** (bits - 1), 2**bits - 1
    if asymmetric:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / most).clamp(min=1e-12)
        zeros = (-low / scales).round()
    else:
        scales = (groups.abs().amax(2) / (half - 1)).clamp(min=1e-12)
        zeros = torch.full_like(scales, half)
    codes = (groups / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, most)
    codes = codes.to(torch.uint8).view(outputs, inputs)
    return packed(bits, codes, scales, zeros.to(torch.int16) if asymmetric else None, None)
