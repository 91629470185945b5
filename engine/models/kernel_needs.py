"""The kernel parameters that a model fixes, so that no other variants are compiled or loaded."""

from __future__ import annotations

import torch

from kiln.engine.models.hf_config import HFConfig
from kiln.jit_kernels.declare.spec import Needs, needs_of
from kiln.jit_kernels.ops.attention.variants import head_tile
from kiln.jit_kernels.ops.moe.spec import expert_capacity


def kernel_needs(config: HFConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> Needs:
    """Return the compile-time values fixed by a model, its dtype, and its KV pool's dtype."""
    experts = config.traits.experts
    routing = {} if experts is None else {"max_experts": expert_capacity(experts.num_experts)}
    return {
        **needs_of(dtype),
        **routing,
        "head_tile": str(head_tile(config.attention.head_dim)),
        "kv_t": "SCALAR_T" if kv_dtype == dtype else "kiln::e4m3",
        "soft_cap": "false",
    }
