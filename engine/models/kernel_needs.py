"""The kernels that a model's layers call, in the variants that the model fixes.

Nothing else is compiled or loaded for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from types import MappingProxyType

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.models.family import Family
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.loader import sample_layers
from kiln.engine.models.quantization import UNQUANTIZED
from kiln.jit_kernels.declare.spec import SCALARS, KernelSpec, Needs
from kiln.jit_kernels.ops.attention.variants import head_tile
from kiln.jit_kernels.ops.dequantize.spec import DEQUANTIZE
from kiln.jit_kernels.ops.moe.spec import ROUTE_TOKENS, expert_capacity
from kiln.jit_kernels.ops.quantization.spec import QUANTIZE
from kiln.jit_kernels.ops.sampling.spec import SAMPLE_TOKENS

# Inputs that share a scale, for the value of SCALED.
_GROUPS = MappingProxyType({"kByOutput": "0", "kBy32": "32", "kBy64": "64", "kByBlock": "128"})
_OF_BYTES = ("E4M3", "I8")  # formats of codes to which activations may be rounded too


def layer_kernels(family: Family, config: HFConfig) -> list[KernelSpec]:
    """Return the operators that a model's layers call, besides those of attention.

    A layer of each kind is built without weights, and its parts say what they call.
    """
    quantised = [] if config.quantization == UNQUANTIZED else [DEQUANTIZE]
    if config.quantization.rounds_activations:
        quantised.append(QUANTIZE)
    return [*dict.fromkeys(kernels_of(sample_layers(family, config))), *quantised]


def kernels_of(part: object) -> Iterator[KernelSpec]:
    """Yield the kernels that a layer and the layers in it say that they call."""
    inner: Iterable[object] = ()
    if isinstance(part, list | tuple):
        inner = part
    elif is_dataclass(part) and not isinstance(part, AttentionLayer):
        inner = [getattr(part, field.name) for field in fields(part)]
    elif type(part).__module__.startswith("kiln."):
        inner = getattr(part, "__dict__", {}).values()
    if not isinstance(part, KernelSpec):
        yield from getattr(part, "kernels", ())
        yield from (spec for one in inner for spec in kernels_of(one))


def kernel_needs(config: HFConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> Needs:
    """Return the compile-time values fixed by a model, its dtype, and its KV pool's dtype."""
    scalar, experts = SCALARS[dtype], config.traits.experts
    routing: dict[str, str] = {}
    if experts is not None:
        router = "float" if experts.router_in_float32 else scalar
        routing = {"router_t": router, "max_experts": expert_capacity(experts.num_experts)}
        if not ROUTE_TOKENS.has_variant(routing):  # route_tokens converts the logits
            routing["router_t"] = "float"
    few = sorted({one.few_rows for one in config.quantization.schemes if one.few_rows})
    rounds = config.quantization.rounds_activations
    formats = list(dict.fromkeys(weight for weight, _ in few))
    return {
        "scalar_t": scalar,
        **routing,
        "weight": ["Plain", *formats],
        "input": ["Plain", *(one for one in formats if rounds and one in _OF_BYTES)],
        "scaled": [*dict.fromkeys(["kNone", *(scaled for _, scaled in few)])],
        "experts": ["false"] if experts is None else ["false", "true"],
        "group": [_GROUPS[scaled] for weight, scaled in few if weight in ("U4", "E2M1")],
        "logits_t": scalar if SAMPLE_TOKENS.has_variant({"logits_t": scalar}) else "float",
        "head_tile": str(head_tile(config.attention.head_dim)),
        "kv_t": "SCALAR_T" if kv_dtype == dtype else "kiln::e4m3",
        "soft_cap": sorted({"true" if cap else "false" for cap in config.soft_caps}),
    }
