"""The arithmetic of a draw in torch, bit for bit as kernel_sources/include/kiln/draw.cuh has it."""

from __future__ import annotations

from functools import cache

import torch

_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, odd; as torch takes 64 bits
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
# Each is a float32.
_POWERS = (1.3862940073013306, 0.48044484853744507, 0.11101467162370682, 0.019343025982379913)
_HIGHEST_POWER = 0.002652945462614298
_ATANH = (2.8571429e-1, 4.0e-1, 6.6666667e-1, 2.0)
_HALF_ROOT = 0x3F3504F3  # the bits of sqrt(1/2)


def weights(logits: torch.Tensor, top: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return 2^((logits - top) * scale), float32 of one shape: 1 at the top, at least 2^-99.

    The polynomial is one of fused multiply-adds. Each is exact in float64 before it is rounded
    once, because ``f`` is a multiple of 2^-23: see weight_of in draw.cuh.
    """
    y = logits.sub(top).mul_(scale).sub_(1.0).clamp_(min=-100.0)
    whole = y.round()
    f = y.sub_(whole).double()
    p = f.mul(_HIGHEST_POWER).add_(_POWERS[-1])
    for power in _POWERS[-2::-1]:
        p = p.float().double().mul_(f).add_(power)
    p = p.float().double().mul_(f).add_(2.0).float()
    return p.view(torch.int32).add_(whole.int().bitwise_left_shift_(23)).view(torch.float32)


def masses(weight: torch.Tensor) -> torch.Tensor:
    """Return weights as integers, in steps of 2^-40: int64, whose sums are exact."""
    return weight.mul(2.0**40).long()


def row_mass(weight: torch.Tensor) -> torch.Tensor:
    """Return the mass of rows of weights [num_rows, size]: int64 [num_rows], eight at a time."""
    size = weight.shape[-1]
    if size % 8:
        weight = torch.nn.functional.pad(weight, (0, 8 - size % 8))
    for _ in range(3):
        weight = weight[..., 0::2] + weight[..., 1::2]
    return masses(weight).sum(-1)


def noise_bits(
    seeds: torch.Tensor, positions: torch.Tensor, size: int, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return 52 random bits for each token of rows: int64, of the shape of ``tokens``.

    ``tokens`` [num_rows, count] are below ``size``; without, all of them are meant. A function of
    seed, position and token id. Four tokens share one output of SplitMix64 for the upper 16 bits.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    steps, shifts = _steps(size, seeds.device)
    if tokens is None:
        steps = steps.unsqueeze(1)
    else:
        steps, shifts = steps[:, tokens], shifts[tokens]
    row = _mix(_mix(seeds + _GAMMA).add_(positions).add_(_GAMMA))
    upper, lower = _mix(torch.stack((row, ~row)).unsqueeze(-1) + steps).unbind(0)
    upper = (upper >> shifts).bitwise_and_(0xFFFF).bitwise_left_shift_(36)
    return upper.bitwise_or_(_shift(lower, 28))


@cache
def _steps(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far a token's states are from its row's, and where its upper bits stand."""
    tokens = torch.arange(size, device=device)
    coarse, fine = (tokens // 4 + 1) * _GAMMA, (tokens + 1) * _GAMMA
    return torch.stack((coarse, fine)), tokens % 4 * 16


def arrivals(bits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return when tokens arrive, float32: -log(1 - u) / weight with u = (bits + 1/2) / 2^52."""
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
    """Shift right and fill with zeros: torch's shift of int64 copies the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output for a state: a bijection of 64 bits."""
    bits = _shift(bits, 30).bitwise_xor_(bits).mul_(_MIX_1)
    bits = _shift(bits, 27).bitwise_xor_(bits).mul_(_MIX_2)
    return _shift(bits, 31).bitwise_xor_(bits)
