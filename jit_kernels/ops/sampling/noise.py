"""Weights and random numbers in torch, bit for bit as in kernel_sources/sampling/draw.cuh."""

from __future__ import annotations

from functools import cache

import torch

_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, odd; as a signed number
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
# Each can be represented in float32.
_POWERS = (
    0.04492241516709328,
    0.2432086318731308,
    -0.09522955864667892,
    0.058831728994846344,
    -0.010225578211247921,
)
_HIGHEST_POWER = 0.001326472731307149
_STEP = 2.0**-22  # the fraction of an exponent is a multiple of this
_ATANH = (2.8571429e-1, 4.0e-1, 6.6666667e-1, 2.0)
_GROUP = 32  # tokens
_HALF_ROOT = 0x3F3504F3  # the bits of sqrt(1/2)


def weights(logits: torch.Tensor, top: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return 2^((logits - top) * scale) as float32: 1 for logits equal to top, at least 2^-100.

    The kernel evaluates the polynomial with fused multiply-adds. In float64 each product and sum
    is exact before the one rounding, because ``g`` is a multiple of 2^-22: see weight_of in
    draw.cuh.
    """
    lowest = torch.div(scale.new_tensor(-100.0), scale)
    y = torch.maximum(logits.sub(top), lowest).double().mul_(scale)
    whole = y.round()
    g = y.sub_(whole).mul_(1 / _STEP).round_().add_(3 / _STEP).mul_(_STEP)
    p = g.mul(_HIGHEST_POWER).add_(_POWERS[-1])
    for power in _POWERS[-2::-1]:
        p = p.float().double().mul_(g).add_(power)
    return p.float().view(torch.int32).add_(whole.int() << 23).view(torch.float32)


def masses(weight: torch.Tensor) -> torch.Tensor:
    """Return weights in fixed point, in steps of 2^-40: int64, so that sums are exact."""
    return weight.mul(2.0**40).long()


def row_states(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the generator states of rows from seed and position: int64, shaped as ``seeds``."""
    return _mix(_mix(seeds + _GAMMA).add_(positions).add_(_GAMMA))


def noise_bits(states: torch.Tensor, tokens: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return 52 random bits for tokens of rows with some states: int64, shaped as ``tokens``.

    A function of seed, position and token id. The bits are below 2^44 where ``low`` is True; see
    low_tokens. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    own = _mix((tokens + 1).mul_(_GAMMA) + ~states)
    high = _shift(own, 12).mul_(255).bitwise_right_shift_(8).add_(1 << 44)
    return torch.where(low, _shift(own, 20), high)


def low_tokens(
    states: torch.Tensor, size: int, columns: torch.Tensor | None = None
) -> torch.Tensor:
    """Return whether tokens have a random number below 2^-8, for rows with some states.

    bool [num_rows, size], or [num_rows, count] for the tokens ``columns``. One output of the
    generator gives the first such token of 32; for each token after it, a byte of another output
    says whether it is one.
    """
    bounds, steps = _low_bounds(states.device), _low_steps(size, states.device)
    groups = -(-size // _GROUP)
    if columns is None:
        outputs = _mix(steps + states.unsqueeze(1))
        first = _GROUP - torch.bucketize(_shift(outputs[:, :groups], 32), bounds, right=True)
        first = first.unsqueeze(-1)
        places = _places(states.device)
        zero = outputs[:, groups:].contiguous().view(torch.uint8).view(-1, groups, _GROUP) == 0
    else:
        which = torch.stack((columns // _GROUP, columns // 8 + groups))
        outputs = _mix(steps[which].add_(states.unsqueeze(1)))
        first = _GROUP - torch.bucketize(_shift(outputs[0], 32), bounds, right=True)
        places = columns % _GROUP
        zero = (outputs[1] >> columns % 8 * 8).bitwise_and_(0xFF) == 0
    low = zero.logical_and_(places > first).logical_or_(places == first)
    return low.flatten(1)[:, :size] if columns is None else low


@cache
def _low_bounds(device: torch.device) -> torch.Tensor:
    """Return the limits of a group's output that give its first low token; ascending."""
    bounds = [0xFF000000]
    while len(bounds) < _GROUP:
        bounds.append(bounds[-1] - (bounds[-1] >> 8))
    return torch.tensor(bounds[::-1], device=device)


@cache
def _low_steps(size: int, device: torch.device) -> torch.Tensor:
    """Return the state offsets from the row's: of groups of 32 tokens, then of groups of 8."""
    groups = -(-size // _GROUP)
    of_groups = torch.arange(1, groups + 1, device=device)
    of_eight = torch.arange(1, _GROUP // 8 * groups + 1, device=device) + (1 << 32)
    return torch.cat((of_groups, of_eight)) * _GAMMA


@cache
def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(_GROUP, device=device)


def arrivals(bits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return arrival times, float32: -log(1 - u) / weight with u = (bits + 1/2) / 2^52."""
    odd = 2 * bits + 1  # u * 2^53
    small = odd < 2**51
    u = odd.float().mul_(2.0**-53)
    rest = (2**53 - odd).float().mul_(2.0**-53).view(torch.int32)
    exponent = (rest - _HALF_ROOT) >> 23
    m = (rest - (exponent << 23)).view(torch.float32)
    z = torch.where(small, -u / (2.0 - u), (m - 1.0) / (m + 1.0))
    s = z * z
    p = torch.full_like(s, 2.2222222e-1)
    for power in _ATANH:
        p = p.mul_(s).add_(power)
    whole = torch.where(small, 0.0, exponent.float() * 0.69314718)
    return -(whole + z * p) / weight


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch shifts int64 arithmetically."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output for a state: a bijection of 64 bits."""
    bits = _shift(bits, 30).bitwise_xor_(bits).mul_(_MIX_1)
    bits = _shift(bits, 27).bitwise_xor_(bits).mul_(_MIX_2)
    return _shift(bits, 31).bitwise_xor_(bits)
