"""AWQ, version gemm."""

from __future__ import annotations

from functools import partial

import torch

from packers.integers import quantise, words, zeros_of
from packers.packer import Packed, Packer

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(weight: torch.Tensor, generator: torch.Generator, size: int) -> Packed:
    """Pack in groups of ``size`` inputs; -1: one group."""
    outputs, inputs = weight.shape
    size = inputs if size == -1 else size
    group_of = torch.arange(inputs) // size
    zeros = zeros_of(outputs, inputs // size, 0, 15, generator)
    made = quantise(weight, group_of, zeros, 4)
    tensors = {
        "qweight": words(made.codes.T, 4, ORDER),
        "qzeros": words(made.zeros.T, 4, ORDER),
        "scales": made.scales.T.contiguous(),
    }
    return Packed(tensors, made.weight)


def config(size: int) -> dict[str, object]:
    """Return the fields of quantization_config."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


PACKERS = [
    Packer("awq", config(128), partial(pack, size=128)),
    Packer("awq-32", config(32), partial(pack, size=32)),
    Packer("awq-channel", config(-1), partial(pack, size=-1)),
]
