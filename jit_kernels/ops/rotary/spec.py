"""The spec of the rotary embedding."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments, declare, derived, in_outs, inputs
from kiln.jit_kernels.declare.spec import (
    DTYPES,
    SCALARS,
    Bound,
    Cost,
    Gpu,
    KernelSpec,
    LaunchGeometry,
    Sizes,
    Variant,
)
from kiln.jit_kernels.ops.rotary import cases
from kiln.jit_kernels.ops.rotary.reference import rotary_reference
from kiln.jit_kernels.torch_ops import define

_THREADS = 160  # maximum per block; smaller blocks start sooner
_MANY = 64  # blocks per multiprocessor: several waves


def _bind(a: Arguments) -> Bound:
    tokens, heads, _ = a.query.shape
    kv_heads, half = a.key.shape[1], a.cos_sin_table.shape[1] // 2
    sizes = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "half": half}
    numbers = {
        "heads": heads,
        "kv_heads": kv_heads,
        "half": half,
        "query_stride": a.query.stride(0),
        "query_head_stride": a.query.stride(1),
        "key_stride": a.key.stride(0),
        "key_head_stride": a.key.stride(1),
    }
    return Bound({"scalar_t": SCALARS[a.query.dtype]}, sizes, numbers)


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Give a thread one vector of each half of a head, or some pairs if that is impossible.

    With several waves of blocks, a thread handles two heads.
    """
    half, heads = sizes["half"], sizes["heads"] + sizes["kv_heads"]
    size = 16 // DTYPES[variant["scalar_t"]].itemsize
    pieces, odd = divmod(half, size)
    if odd or not 0 < pieces <= _THREADS:
        return LaunchGeometry((sizes["tokens"], 1, 1), (_THREADS, 1, 1))
    blocks = -(-heads // (_THREADS // pieces))
    each = 2 if sizes["tokens"] * blocks >= _MANY * gpu.num_multiprocessors else 1
    blocks = -(-blocks // each)
    at_once = max(1, -(-heads // (blocks * each)))  # so that all blocks have equally many heads
    return LaunchGeometry((sizes["tokens"], blocks, 1), (pieces, at_once, 1))


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    tokens, half = sizes["tokens"], sizes["half"]
    elements = tokens * (sizes["heads"] + sizes["kv_heads"]) * 2 * half
    moved = 2 * elements * DTYPES[variant["scalar_t"]].itemsize
    return Cost(moved + tokens * (8 + 2 * half * 4), 3 * elements)


APPLY_ROTARY = KernelSpec(
    name="apply_rotary",
    source="rotary/apply_rotary.cu",
    entry="apply_rotary",
    parameters=declare(
        inputs("positions"),
        in_outs("query", "key"),
        inputs("cos_sin_table"),
        derived("int32", "heads", "kv_heads", "half"),
        derived("int64", "query_stride", "query_head_stride", "key_stride", "key_head_stride"),
    ),
    params={"scalar_t": list(DTYPES)},
    bind=_bind,
    geometry=_geometry,
    cost=_cost,
    reference=rotary_reference,
    make_inputs=cases.rotary_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance={torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    paper="https://arxiv.org/abs/2104.09864",
)
SPECS = [APPLY_ROTARY]
define(SPECS)
