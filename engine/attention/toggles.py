"""Whether Kiln's attention kernels support a model, and whether their toggles allow that."""

from __future__ import annotations

from kiln.engine.errors import ConfigError
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import Needs
from kiln.jit_kernels.ops.attention.variants import KV_BLOCK
from kiln.jit_kernels.registry import operators

ATTENTION_FAMILIES = ("attention_decode", "attention_prefill")


def kernels_can_attend(needs: Needs, block_size: int) -> bool:
    """Return whether paged kernels support a model; if not, torch's operations run it.

    They read blocks of 16 tokens, and exist for some dtypes and head_dims. With a soft cap, they
    exist for fewer of these.
    Raises ConfigError if a toggle asks for a kernel that does not support the model.
    """
    can = True
    for spec in operators():
        if spec.family not in ATTENTION_FAMILIES:
            continue
        lacking = spec.lacking(needs)
        can = can and block_size == KV_BLOCK and not lacking
        toggle, name = settings().kernel_choice(spec.family), f"KILN_{spec.family.upper()}"
        if toggle not in ("jit", "triton"):
            continue
        if block_size != KV_BLOCK:
            raise ConfigError(
                f"block_size={block_size}: {name}={toggle} asks for a kernel that reads blocks of "
                f"{KV_BLOCK} tokens only; set block_size to {KV_BLOCK}, or unset {name}"
            )
        if lacking:
            told = ", ".join(f"{part} {value}" for part, value in lacking[0].items())
            raise ConfigError(
                f"{name}={toggle}: there is no such kernel for this model's dtype, head_dim and "
                f"soft cap ({told}); choose another dtype, or unset {name}"
            )
    return can
