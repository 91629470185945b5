"""The kernels that a model's layers call, in the variants that the model fixes.

Nothing else is compiled or loaded for it.
"""

from __future__ import annotations

import torch

from kiln.engine.layers.mlp import GATES
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.quantization import UNQUANTIZED
from kiln.jit_kernels.declare.spec import SCALARS, KernelSpec, Needs
from kiln.jit_kernels.ops.attention.variants import head_tile
from kiln.jit_kernels.ops.dequantize.spec import DEQUANTIZE
from kiln.jit_kernels.ops.moe import functions as moe
from kiln.jit_kernels.ops.moe.spec import ROUTE_TOKENS, expert_capacity
from kiln.jit_kernels.ops.norm.spec import FUSED_ADD_RMS_NORM
from kiln.jit_kernels.ops.quantization.spec import QUANTIZE
from kiln.jit_kernels.ops.sampling.spec import SAMPLE_TOKENS


def layer_kernels(config: HFConfig) -> list[KernelSpec]:
    """Return the operators that a model's layers call, besides those of attention."""
    experts = () if config.traits.experts is None else moe.CALLED
    quantised = [] if config.quantization == UNQUANTIZED else [DEQUANTIZE]
    if config.quantization.rounds_activations:
        quantised.append(QUANTIZE)
    return [FUSED_ADD_RMS_NORM, GATES[config.activation], *experts, *quantised]


def kernel_needs(config: HFConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> Needs:
    """Return the compile-time values fixed by a model, its dtype, and its KV pool's dtype."""
    scalar, experts = SCALARS[dtype], config.traits.experts
    routing: dict[str, str] = {}
    if experts is not None:
        routing = {"router_t": scalar, "max_experts": expert_capacity(experts.num_experts)}
        if not ROUTE_TOKENS.has_variant(routing):  # route_tokens converts the logits
            routing["router_t"] = "float"
    return {
        "scalar_t": scalar,
        **routing,
        "logits_t": scalar if SAMPLE_TOKENS.has_variant({"logits_t": scalar}) else "float",
        "head_tile": str(head_tile(config.attention.head_dim)),
        "kv_t": "SCALAR_T" if kv_dtype == dtype else "kiln::e4m3",
        "soft_cap": "false",
    }
