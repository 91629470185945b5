"""Whether the toggles of the attention kernels can be obeyed."""

from __future__ import annotations

from kiln.engine.errors import ConfigError
from kiln.jit_kernels.attention.splits import KV_BLOCK
from kiln.jit_kernels.registry import operators
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.spec import Needs


def check_attention_toggles(needs: Needs, block_size: int) -> None:
    """Check that attention kernels which a toggle asks for can serve a model.

    Under "auto" torch's operations serve it where the kernels cannot. Raises ConfigError.
    """
    for spec in operators():
        toggle = settings().kernel_choice(spec.family)
        if not spec.family.startswith("attention_") or toggle not in ("jit", "triton"):
            continue
        name = f"KILN_{spec.family.upper()}"
        if block_size != KV_BLOCK:
            raise ConfigError(
                f"block_size={block_size}: {name}={toggle} asks for a kernel that reads blocks of "
                f"{KV_BLOCK} tokens only; set block_size to {KV_BLOCK}, or unset {name}"
            )
        if next(spec.variants(needs), None) is None:
            raise ConfigError(
                f"{name}={toggle}: there is no such kernel for this model's dtype and head_dim; "
                f"choose another dtype, or unset {name}"
            )
