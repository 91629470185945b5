"""The norms of model families."""

from __future__ import annotations

from enum import Enum


class NormKind(Enum):
    """What a family's norms compute. Rounding matters in 16 bits alone."""

    RMS = "x̂ is rounded, then multiplied by the weight"  # Llama
    RMS_ROUND_ONCE = "x̂ times the weight, rounded once"  # OLMo-2, gpt-oss
    RMS_ZERO_CENTRED = "x̂ times (1 + the weight), rounded once"  # Gemma
    LAYER = "(x - mean) / deviation times the weight, rounded once"  # Cohere-2
    LAYER_ZERO_CENTRED = "the same with 1 + the weight, and a bias"  # Nemotron
