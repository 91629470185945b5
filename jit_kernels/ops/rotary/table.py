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
    Source: https://arxiv.org/abs/2309.00071 for yarn.
    """

    kind: Literal["linear", "llama3", "yarn"]
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


def rotary_table(
    rotary_dim: int, max_position: int, theta: float, scaling: RopeScaling | None = None
) -> torch.Tensor:
    """Return cosines then sines of every position: [max_position, rotary_dim] float32 on the CPU.

    Angles are float32 products, as transformers computes them, so that tokens agree. Raises
    ValueError on an odd ``rotary_dim``.
    """
    if rotary_dim % 2:
        raise ValueError(f"rotary_dim is {rotary_dim}, want an even number of dimensions")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    powers = theta**exponents
    frequencies, magnitude = 1.0 / powers, 1.0
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None and scaling.kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling is not None:
        frequencies = _yarn(powers, rotary_dim, theta, scaling)
        magnitude = _yarn_magnitude(scaling)
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
