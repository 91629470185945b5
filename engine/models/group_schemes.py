"""What the formats of integers with a scale per group of inputs share."""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
import torch.nn.functional as F

from kiln.engine.layers.channel_weight import ChannelWeight
from kiln.engine.layers.group_weight import Group4Weight, Group8Weight
from kiln.engine.models.scheme import Part
from kiln.jit_kernels.ops.shared.four_bits import CHUNK

_SCALED = MappingProxyType({0: "kByOutput", 32: "kBy32", 64: "kBy64", 128: "kByBlock"})


def group_weight(
    part: Part,
    bits: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None = None,
    group_size: int | None = None,
) -> Group8Weight | ChannelWeight:
    """Return the rank's inputs of codes that were unpacked; the outputs are already the rank's.

    codes: [out, in] uint8, of all inputs; scales: [out, groups] float32; zeros: [out, groups]
    int16, or None if they are half of the number of codes. ``group_size``: of inputs, of which the
    last group may have fewer; None: groups of equal size. group_of: [in] int32, the group of each
    input, or None if the groups are of neighbours. A rank that has a part of a group gets smaller
    groups with the same scales, so that every share can be cut.
    """
    whole, groups, share = codes.shape[1], scales.shape[1], part.inputs
    size = group_size or whole // groups
    if -(-whole // size) != groups:
        raise ValueError(f"{part.name}: {groups} groups of {size} inputs are not {whole}")
    if group_of is None:
        own = math.gcd(size, share.start, share.size, share.room)
        starts = torch.arange(share.start, share.start + share.size, own, device=codes.device)
        chosen = starts // size
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
    return packed(bits, codes, scales, zeros, group_of)


def packed(
    bits: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None,
) -> Group8Weight | ChannelWeight:
    """Return the weights of codes [out, in] of one byte each."""
    if bits == 4:
        return Group4Weight.of(codes, scales, zeros, group_of)
    if scales.shape[1] == 1 and zeros is None and group_of is None:
        return ChannelWeight((codes ^ 0x80).view(torch.int8), scales.contiguous())
    zeros = None if zeros is None else zeros.contiguous()
    return Group8Weight(codes.contiguous(), scales.contiguous(), zeros, group_of)


def in_order(group_of: torch.Tensor, group_size: int) -> bool:
    """Whether the groups of inputs [in] are of neighbours, as many files list them."""
    places = torch.arange(len(group_of), device=group_of.device)
    return torch.equal(group_of.long(), places // group_size)


def check_order(part: Part, suffix: str, group_of: torch.Tensor, group_size: int) -> None:
    """Raise ModelError unless each group is that of as many inputs [in] as ``group_size`` says.

    The last group may have fewer. ``suffix``: of the tensor that gives the groups.
    """
    inputs = len(group_of)
    groups = -(-inputs // group_size)
    outside = group_of[(group_of < 0) | (group_of >= groups)]
    if len(outside):
        raise part.error(suffix, f"has group {int(outside[0])}: want 0 to {groups - 1}")
    for group, count in enumerate(torch.bincount(group_of, minlength=groups).tolist()):
        wanted = min(group_size, inputs - group * group_size)
        if count != wanted:
            raise part.error(
                suffix, f"has {count} inputs of group {group}: want {wanted}, by group_size"
            )


def quantized_by_group(
    values: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    asymmetric: bool,
    gives_order: bool = False,
) -> Group8Weight | ChannelWeight:
    """Return weights [out, in] rounded to integers, for random weights.

    ``group_size``: of inputs; where it does not divide them, the largest divisor of both.
    ``gives_order``: the group of each input is kept, although the groups are of neighbours.
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
    order = torch.arange(inputs, device=values.device, dtype=torch.int32) // size
    kept = zeros.to(torch.int16) if asymmetric else None
    return packed(bits, codes, scales, kept, order if gives_order else None)


def few_rows_of(bits: int, group_size: int, *, symmetric: bool) -> tuple[str, ...]:
    """Return ``Scheme.few_rows`` of groups of so many inputs, 0: of all.

    ``symmetric``: there are no zero points, and no group is of inputs from anywhere. A rank that
    has a part of a group has smaller ones, which are dequantised.
    """
    scaled = _SCALED.get(math.gcd(group_size, CHUNK) if group_size else 0)
    if bits == 8:
        return ("I8", "kByOutput") if symmetric and not group_size else ()
    return ("U4", scaled) if bits == 4 and scaled else ()


def stored_bits(bits: int, group_size: int, *, asymmetric: bool) -> float:
    """Return the bits of a weight with its share of a scale and a zero point.

    ``group_size`` 0: of all inputs, which are so many that their share is nothing.
    """
    return bits + (32 + 16 * asymmetric) / group_size if group_size else bits
