"""What --quantization fp8 makes of a checkpoint of floats."""

from __future__ import annotations

import torch
from packers.fp8 import round_rows
from packers.packer import Packed, Packer


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a weight by the rule, each operation rounded to float32."""
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).clamp(min=2.0**-126)
    return (weight.float() * (1 / scales)).to(torch.float8_e4m3fn), scales


def pack(weight: torch.Tensor, generator: torch.Generator) -> Packed:
    """Store the floats; the weight is what they are quantised to."""
    codes, scales = quantised(weight)
    return Packed({"weight": weight.float()}, codes.double() * scales.double())


FLOATS = Packer("floats", {}, pack, round_rows)
