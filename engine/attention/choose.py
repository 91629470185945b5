"""Choose between Kiln's attention kernels and torch for a model."""

from __future__ import annotations

import torch

from kiln.jit_kernels.choose import choice
from kiln.jit_kernels.ops.attention.variants import KV_BLOCK
from kiln.jit_kernels.registry import operators
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.spec import Needs

_FAMILIES = ("attention_decode", "attention_prefill")


def kernels_attend(device: torch.device, needs: Needs, block_size: int) -> bool:
    """Return whether the paged kernels, not torch's operations, run a model's attention.

    This needs blocks of 16 tokens and a kernel for the model's dtype and head_dim that the toggles
    allow; on a CPU also ``KILN_CPU_KERNELS``. If only one of the two families is set to "torch",
    its requests go through the kernel's reference.
    """
    supported = all(
        next(spec.variants(needs), None) is not None
        for spec in operators()
        if spec.family in _FAMILIES
    )
    if block_size != KV_BLOCK or not supported:
        return False
    if device.type == "cuda":
        return any(choice(family, needs).implementation != "torch" for family in _FAMILIES)
    chosen = (settings().kernel_choice(family) for family in _FAMILIES)
    return settings().cpu_kernels != "torch" and any(one != "torch" for one in chosen)
