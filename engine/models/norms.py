"""The norms of model families."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType


class NormKind(Enum):
    """What a family's norms compute. Rounding matters in 16 bits alone."""

    RMS = "x̂ is rounded, then multiplied by the weight"  # Llama
    RMS_ROUND_ONCE = "x̂ times the weight, rounded once"  # OLMo-2, gpt-oss
    RMS_ZERO_CENTRED = "x̂ times (1 + the weight), rounded once"  # Gemma
    LAYER = "(x - mean) / deviation times the weight, rounded once"  # Cohere-2
    LAYER_ZERO_CENTRED = "the same with 1 + the weight, and a bias"  # Nemotron


RMS_FORMS = MappingProxyType(
    {
        NormKind.RMS: (0.0, False),
        NormKind.RMS_ROUND_ONCE: (0.0, True),
        NormKind.RMS_ZERO_CENTRED: (1.0, True),
    }
)  # ``weight_offset`` and ``round_once`` of the norms without a mean
