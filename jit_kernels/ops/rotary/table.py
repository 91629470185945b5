"""Tables of cosines and sines for rotary embeddings, with the usual RoPE scaling methods."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a model scales its rotary frequencies; field names as in its config.json.

    ``linear`` reads ``factor``; ``llama3`` also the two frequency factors and
    ``original_max_position_embeddings``; ``yarn`` also betas, mscales and ``attention_factor``.
    ``longrope`` divides each of the rotary_dim / 2 frequencies by its own number of
    ``short_factor``, in longer requests than ``original_max_position_embeddings`` tokens by that of
    ``long_factor``; cosines and sines of both are multiplied by ``attention_factor``.
    Source: https://arxiv.org/abs/2309.00071 for yarn, https://arxiv.org/abs/2402.13753 for longrope
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def rotary_table(
    rotary_dim: int,
    max_position: int,
    theta: float,
    scaling: RopeScaling | None = None,
    long_start: int = 0,
) -> torch.Tensor:
    """Return cosines then sines of every position: [max_position, rotary_dim] float32 on the CPU.

    With ``long_start`` there are so many rows ahead of these, [long_start + max_position,
    rotary_dim]: the first positions of requests that get no longer than that. longrope has other
    frequencies for them.

    Angles are float32 products, as transformers computes them, so that tokens agree. Raises
    ValueError on an odd ``rotary_dim``.
    """
    if rotary_dim % 2:
        raise ValueError(f"rotary_dim is {rotary_dim}, want an even number of dimensions")
    if long_start:
        short = _table(rotary_dim, long_start, theta, scaling)
        return torch.cat((short, _table(rotary_dim, max_position, theta, scaling, is_long=True)))
    return _table(rotary_dim, max_position, theta, scaling)


def _table(
    rotary_dim: int,
    max_position: int,
    theta: float,
    scaling: RopeScaling | None,
    *,
    is_long: bool = False,
) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    powers = theta**exponents
    frequencies, magnitude = 1.0 / powers, 1.0
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None and scaling.kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling is not None and scaling.kind == "yarn":
        frequencies = _yarn(powers, rotary_dim, theta, scaling)
        magnitude = _yarn_magnitude(scaling)
    elif scaling is not None:
        factors = scaling.long_factor if is_long else scaling.short_factor
        frequencies = 1.0 / (torch.tensor(factors) * powers)
        magnitude = _longrope_magnitude(scaling)
    angles = torch.arange(max_position).float().unsqueeze(1) * frequencies
    return torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=-1)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Scale long wavelengths, keep short ones, blend in between."""
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    longest = original / scaling.low_freq_factor
    shortest = original / scaling.high_freq_factor
    slowed = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = (original / wavelengths - scaling.low_freq_factor) / span
    blended = (1 - blend) * slowed / scaling.factor + blend * slowed
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, slowed)


def _yarn(
    powers: torch.Tensor, rotary_dim: int, theta: float, scaling: RopeScaling
) -> torch.Tensor:
    """Interpolate low frequencies, extrapolate high ones, ramp in between."""

    def turns_at(turns: float) -> float:
        ratio = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return rotary_dim * math.log(ratio) / (2 * math.log(theta))

    low, high = turns_at(scaling.beta_fast), turns_at(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rotary_dim // 2).float() - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (scaling.factor * powers)) * (1 - keep) + (1.0 / powers) * keep


def _yarn_magnitude(scaling: RopeScaling) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def _longrope_magnitude(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    original = scaling.original_max_position_embeddings
    return math.sqrt(1 + math.log(scaling.factor) / math.log(original))
