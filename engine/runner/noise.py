"""Random numbers that a seed, a position and a token id give, on any device.

A counter-based generator has no state to carry and none to share: a request's draws do not depend
on its neighbours, on chunking, or on how often it was preempted.
"""

from __future__ import annotations

import torch

_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1


def exponential_noise(
    seeds: list[int], positions: list[int], size: int, device: torch.device
) -> torch.Tensor:
    """Return Exp(1) variates [num_rows, size] float64, one for each (seed, position, column).

    Each row is the SplitMix64 stream of a key; 53 bits a variate. Source: Steele, Lea, Flood,
    "Fast splittable pseudorandom number generators", 2014.
    """
    keys = [_mix(_mix(seed) + position) for seed, position in zip(seeds, positions, strict=True)]
    start = torch.tensor([_signed(key) for key in keys], device=device).unsqueeze(1)
    steps = torch.arange(1, size + 1, device=device).mul_(_signed(_GAMMA))  # wraps, as it should
    bits = start + steps
    bits = (bits ^ _shift(bits, 30)).mul_(_signed(_MIX_1))
    bits = (bits ^ _shift(bits, 27)).mul_(_signed(_MIX_2))
    bits = _shift(bits ^ _shift(bits, 31), 11)  # 53 bits, exact in float64
    return bits.double().add_(0.5).mul_(2.0**-53).log_().neg_()


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right and fill with zeros: torch's shift of int64 copies the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mix(value: int) -> int:
    """Return SplitMix64's output for a state: a bijection of 64 bits."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """Return the two's complement of a 64-bit pattern, which is how torch takes it."""
    return value - 2**64 if value >= 2**63 else value
