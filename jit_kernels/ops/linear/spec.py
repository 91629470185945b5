"""The specs of the product of a few rows, and of those with a gated activation behind it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from types import MappingProxyType

import torch

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    inputs,
    operator_only,
    optional,
    outputs,
)
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
from kiln.jit_kernels.ops.linear import cases
from kiln.jit_kernels.ops.linear.checks import (
    MOST_TILES,
    TILE_ROWS,
    is_aligned,
    variant_of,
    why_not,
)
from kiln.jit_kernels.ops.linear.reference import (
    BLOCK,
    gated_reference,
    skinny_gemm_reference,
)
from kiln.jit_kernels.torch_ops import define

_WEIGHT_ROWS, _THREADS = 16, 512  # of a block
_FORMATS = MappingProxyType(
    {
        "weight": list(cases.BITS),
        "input": ["Plain", "E4M3", "I8"],
        "scaled": ["kNone", "kByOutput", "kByBlock", "kBy64", "kBy32"],
    }
)
_BLOCKS_OF_MULTIPROCESSOR, _LEAST_TURNS, _GROUPED_TURNS = 2, 3, 4


def _bind(name: str, gate: str, a: Arguments) -> Bound:
    if problem := why_not(a, is_gated=bool(gate)):
        raise ValueError(f"{name}: {problem}")
    (rows, size), outputs_ = a.x.shape, a.out.shape[1]
    by_row = a.scales is None or a.scales.shape[-2] == a.weight.shape[-2]
    grouped = a.ends is not None
    sizes = {"outputs": outputs_}
    if grouped:
        sizes |= {"grouped": rows, "experts": len(a.weight)}
    numbers = {
        "x_stride": a.x.stride(0),
        "weight_stride": a.weight.stride(-2),
        "out_stride": a.out.stride(0),
        "x_scale_row": 0 if a.x_scales is None else a.x_scales.stride(0),
        "x_scale_column": 0 if a.x_scales is None else a.x_scales.stride(1),
        "expert_weights": a.weight.stride(0) if grouped else 0,
        "expert_scales": a.scales[0].numel() if grouped and a.scales is not None else 0,
        "rows": rows,
        "outputs": outputs_,
        "inputs": size,
        "scale_columns": 0 if a.scales is None else a.scales.shape[-1],
        "outputs_log2": 0 if by_row else BLOCK.bit_length() - 1,
        "num_experts": len(a.weight) if grouped else 0,
        "aligned": int(is_aligned(a.x) and is_aligned(a.weight)),
    }
    return Bound(variant_of(a, gate), sizes, numbers)


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return blocks of 16 rows of weights for each tile, or fewer that go on to further outputs.

    That saves the time in which a block has nothing to multiply yet. It pays off with experts, and
    with blocks of 4-bit codes that are so many that all end at about the same time.
    """
    tiles, rows = int(variant["tiles"]), sizes.get("grouped", 0)
    of_block = _WEIGHT_ROWS * tiles // (2 if "gate" in variant else 1)
    blocks = -(-sizes["outputs"] // of_block)
    at_once = _BLOCKS_OF_MULTIPROCESSOR // tiles * gpu.num_multiprocessors
    runs, likely = 1, 1  # of rows of experts; see linear/experts.cuh
    if rows:
        likely = min(sizes["experts"], rows)
        runs = likely + -(-rows // (tiles * TILE_ROWS)) - 1
        at_once = -(-_GROUPED_TURNS * at_once // likely)
    is_short = cases.BITS[variant["weight"]] == 4
    if rows or (is_short and blocks >= _LEAST_TURNS * at_once):
        blocks = -(-blocks // -(-blocks // at_once))
    return LaunchGeometry((blocks, runs, 1), (_THREADS, 1, 1))


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    """Count every expert's weights; some may have no rows."""
    (rows, size), outputs_ = cases.shape_of_x(variant, sizes), sizes["outputs"]
    item, experts = DTYPES[variant["scalar_t"]].itemsize, cases.experts_of(variant, sizes)
    bits = cases.BITS[variant["weight"]] or 8 * item
    weights = experts * outputs_ * cases.padded(variant, size) * bits // 8
    of_x = rows * size * (item if variant["input"] == "Plain" else 1)
    scale_rows, columns = cases.shape_of_scales(variant, sizes)
    scale_bytes = 1 if variant["weight"] == "E2M1" else 4 + 2 * cases.has_zeros(variant, sizes)
    scales = experts * scale_rows * columns * scale_bytes
    if variant["input"] != "Plain":
        scales += 4 * rows * max(columns - 1, 1)
    of_bias = experts * outputs_ if sizes.get("bias") else 0
    places = 4 * (rows + experts) if variant["experts"] == "true" else 0
    moved = weights + of_x + (rows * outputs_ + of_bias) * item + scales + places
    return Cost(moved, 2 * rows * outputs_ * size)


def _is_supported(variant: Variant) -> bool:
    """Codes have scales, and codes of x are multiplied by those of their own format alone."""
    weight, scaled = variant["weight"], variant["scaled"]
    if variant["input"] not in ("Plain", weight):
        return False
    return (
        scaled
        in {
            "Plain": ("kNone",),
            "E4M3": ("kByOutput", "kByBlock"),
            "I8": ("kByOutput",),
            "U4": ("kByOutput", "kByBlock", "kBy64", "kBy32"),
            "E2M1": ("kBy32",),
        }[weight]
    )


def _is_possible(some: Variant) -> bool:
    """Whether a call has these values: codes have scales, whatever other layers of a model have."""
    choices = ([some[name]] if name in some else own for name, own in _FORMATS.items())
    every = product(*choices)
    return any(_is_supported(dict(zip(_FORMATS, one, strict=True))) for one in every)


SKINNY_GEMM = KernelSpec(
    name="skinny_gemm",
    source="linear/skinny_gemm.cu",
    entry="skinny_gemm",
    parameters=declare(
        outputs("out"),
        inputs("x", "weight"),
        optional("x_scales", "scales", "zeros", "bias", "expert_of", "ends"),
        derived("int64", "x_stride", "weight_stride", "out_stride"),
        derived("int64", "expert_weights"),
        derived("int32", "x_scale_row", "x_scale_column", "expert_scales"),
        derived("int32", "rows", "outputs", "inputs", "scale_columns"),
        derived("int32", "outputs_log2", "num_experts", "aligned"),
        operator_only("int32", "tiles"),
    ),
    params={
        "scalar_t": [SCALARS[torch.bfloat16], SCALARS[torch.float16]],
        **_FORMATS,
        "tiles": [str(one + 1) for one in range(MOST_TILES)],
        "experts": ["false", "true"],
    },
    bind=partial(_bind, "skinny_gemm", ""),
    geometry=_geometry,
    cost=_cost,
    reference=skinny_gemm_reference,
    make_inputs=cases.skinny_gemm_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance={torch.float16: 6e-4, torch.bfloat16: 4e-3},
    is_supported=_is_supported,
    is_possible=_is_possible,
    max_cpu_seconds=0.4,
    min_arch=80,
    bench_needs={"scalar_t": "kiln::bf16", "tiles": "1", "experts": "false"},
    paper="https://arxiv.org/abs/2408.11743",  # weights as the left operand of mma
)


# Where x is rounded, the activation rounds its results too, and is a kernel of its own.
_UNROUNDED = MappingProxyType(
    {"weight": ["Plain", "E4M3", "I8", "U4"], "input": ["Plain"], "experts": ["false"]}
)


def _gated_cost(variant: Variant, sizes: Sizes) -> Cost:
    whole = _cost(variant, cases.twice_the_outputs(sizes))
    rows, item = cases.shape_of_x(variant, sizes)[0], DTYPES[variant["scalar_t"]].itemsize
    return replace(whole, bytes=whole.bytes - rows * sizes["outputs"] * item)


def _gated(activation: str) -> KernelSpec:
    """Return the spec of act(gate) * up, where x @ weight.T has all gates, and then all ups."""
    name = f"skinny_gemm_{activation}_and_mul"
    return replace(
        SKINNY_GEMM,
        name=name,
        params={**SKINNY_GEMM.params, **_UNROUNDED, "gate": [activation]},
        bind=partial(_bind, name, activation),
        cost=_gated_cost,
        reference=partial(gated_reference, activation),
        make_inputs=cases.gated_inputs,
        # Gate and up are rounded before the activation. For a gate near -5, silu multiplies the
        # relative error of that rounding by four.
        tolerance={torch.float16: 3e-3, torch.bfloat16: 2.4e-2},
        has_unfused_path=True,
    )


GATED = {activation: _gated(activation) for activation in ("silu", "gelu_tanh")}
SPECS = [SKINNY_GEMM, *GATED.values()]
define(SPECS)
