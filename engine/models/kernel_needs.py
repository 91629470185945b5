"""The kernels that a model's layers call, in the variants that the model fixes.

Nothing else is compiled or loaded for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from types import MappingProxyType

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.layers.rounding import ROUNDING_KERNELS
from kiln.engine.layers.scaled_products import has_blocks, has_rows
from kiln.engine.models.family import Family
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.loader import sample_layers
from kiln.engine.models.quantization import UNQUANTIZED
from kiln.engine.models.scheme import Scheme
from kiln.jit_kernels.declare.spec import SCALARS, KernelSpec, Needs
from kiln.jit_kernels.ops.attention.variants import head_tile
from kiln.jit_kernels.ops.dequantize.spec import DEQUANTIZE
from kiln.jit_kernels.ops.moe.spec import ROUTE_TOKENS, expert_capacity
from kiln.jit_kernels.ops.quantization.codes import QUANTS
from kiln.jit_kernels.ops.sampling.spec import SAMPLE_TOKENS

_CODES = MappingProxyType({"E4M3": torch.float8_e4m3fn, "I8": torch.int8})
# Inputs that share a scale, for the value of SCALED.
_GROUPS = MappingProxyType({"kByOutput": "0", "kBy32": "32", "kBy64": "64", "kByBlock": "128"})


def layer_kernels(family: Family, config: HFConfig) -> list[KernelSpec]:
    """Return the operators that a model's layers call, besides those of attention.

    A layer of each kind is built without weights, and its parts say what they call.
    """
    quantised = [] if config.quantization == UNQUANTIZED else [DEQUANTIZE]
    if config.quantization.rounds_activations:
        quantised += ROUNDING_KERNELS
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


def dequantises(config: HFConfig, device: torch.device) -> bool:
    """Whether torch dequantises some weights of a model on a device; experts count as such.

    A GPU without an index stands for those of other machines, of which some may.
    """
    experts = config.traits.experts is not None
    schemes = [one for one in config.quantization.schemes if one.few_rows]
    return any(experts or not _is_torchs(one, device) for one in schemes)


def _is_torchs(scheme: Scheme, device: torch.device) -> bool:
    """Whether torch has a product for the codes of a scheme on a device."""
    weight, scaled = scheme.few_rows
    if weight not in _CODES or not scheme.rounds or device.index is None:
        return False
    return has_blocks(device) if scaled == "kByBlock" else has_rows(device, _CODES[weight])


def kernel_needs(config: HFConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> Needs:
    """Return the compile-time values fixed by a model, its dtype, and its KV pool's dtype."""
    scalar, experts = SCALARS[dtype], config.traits.experts
    routing: dict[str, str] = {}
    if experts is not None:
        router = "float" if experts.router_in_float32 else scalar
        routing = {"router_t": router, "max_experts": expert_capacity(experts.num_experts)}
        if not ROUTE_TOKENS.has_variant(routing):  # route_tokens converts the logits
            routing["router_t"] = "float"
    schemes = [one for one in config.quantization.schemes if one.few_rows]
    few = sorted({one.few_rows for one in schemes})
    rounded = sorted({one.few_rows[0] for one in schemes if one.rounds})
    return {
        "scalar_t": scalar,
        **routing,
        **({"quant_t": [QUANTS[_CODES[one]] for one in rounded]} if rounded else {}),
        "weight": [*dict.fromkeys(["Plain", *(weight for weight, _ in few)])],
        "input": ["Plain", *rounded],
        "scaled": [*dict.fromkeys(["kNone", *(scaled for _, scaled in few)])],
        "experts": ["false"] if experts is None else ["false", "true"],
        "group": [*dict.fromkeys(_GROUPS[scaled] for _, scaled in few)],
        "logits_t": scalar if SAMPLE_TOKENS.has_variant({"logits_t": scalar}) else "float",
        "head_tile": str(head_tile(config.attention.head_dim)),
        "kv_t": "SCALAR_T" if kv_dtype == dtype else "kiln::e4m3",
        "soft_cap": sorted({"true" if cap else "false" for cap in config.soft_caps}),
    }
