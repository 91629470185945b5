"""GPTQ, versions 1 and 2."""

from __future__ import annotations

from typing import Any

import torch

from packers.integers import quantise, words, zeros_of
from packers.packer import Packed, Packer


def pack(weight: torch.Tensor, generator: torch.Generator, fields: dict[str, Any]) -> Packed:
    """Pack as the fields of quantization_config say."""
    outputs, inputs = weight.shape
    bits, size = fields["bits"], fields["group_size"]
    size = inputs if size == -1 else size
    group_of = torch.arange(inputs) // size
    if fields["desc_act"]:
        group_of = group_of[torch.randperm(inputs, generator=generator)]
    groups, offset = -(-inputs // size), int(fields["checkpoint_format"] == "gptq")
    zeros = torch.full((outputs, groups), 2 ** (bits - 1))
    if not fields["sym"]:
        zeros = zeros_of(outputs, groups, offset, 2**bits - 1 + offset, generator)
    made = quantise(weight, group_of, zeros, bits)
    tensors = {
        "qweight": words(made.codes, bits).T.contiguous(),
        "qzeros": words(made.zeros.T - offset, bits),
        "scales": made.scales.T.contiguous(),
        "g_idx": group_of.to(torch.int32),
    }
    return Packed(tensors, made.weight)


def packer(name: str, **fields: Any) -> Packer:
    """Return a packer; ``fields`` differ from the most common ones."""
    common = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    }
    config = {**common, **fields}
    return Packer(name, config, lambda weight, generator: pack(weight, generator, config))


PACKERS = [
    packer("gptq"),
    packer("gptq-zeros", sym=False, group_size=32),
    packer("gptq-v2-zeros", sym=False, group_size=64, checkpoint_format="gptq_v2"),
    packer("gptq-act-order", sym=False, group_size=32, desc_act=True),
    packer("gptq-channel", sym=False, group_size=-1, desc_act=True),
    packer("gptq-8", bits=8),
    packer("gptq-8-zeros", bits=8, sym=False, group_size=32, desc_act=True),
]
