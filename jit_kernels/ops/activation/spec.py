"""The specs of the gated activations: one template for those without arguments, and one with."""

from __future__ import annotations

from functools import partial

import torch

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    inputs,
    outputs,
    values,
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
from kiln.jit_kernels.ops.activation import cases
from kiln.jit_kernels.ops.activation.reference import (
    ACTIVATIONS,
    act_and_mul_reference,
    clamped_swiglu_reference,
)
from kiln.jit_kernels.torch_ops import define

_THREADS = 128
_PIECES, _PIECE_BYTES = 2, 8  # per thread, per piece: kPieces and Piece of the template
_MAX_BLOCKS = 65535  # the limit of grid.y and grid.z
_SIZES = ("rows", "d", "out_stride", "x_stride")
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def _bind(fixed: Variant, a: Arguments) -> Bound:
    rows, d = a.out.shape
    variant = {"scalar_t": SCALARS[a.x.dtype], **fixed}
    strides = {"out_stride": a.out.stride(0), "x_stride": a.x.stride(0)}
    return Bound(variant, {"rows": rows, "d": d}, {"rows": rows, "d": d, **strides})


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Cover a row with blocks of 128 threads; narrow rows share a block."""
    pieces = -(-sizes["d"] * DTYPES[variant["scalar_t"]].itemsize // _PIECE_BYTES)
    wanted = -(-pieces // _PIECES)
    across = min(1 << max(wanted - 1, 0).bit_length(), _THREADS)
    down = _THREADS // across
    rows = -(-sizes["rows"] // down)
    deep = max(-(-rows // _MAX_BLOCKS), 1)
    return LaunchGeometry((-(-wanted // across), -(-rows // deep), deep), (across, down, 1))


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    elements = sizes["rows"] * sizes["d"]
    return Cost(3 * elements * DTYPES[variant["scalar_t"]].itemsize, 5 * elements)


BY_ACTIVATION = {
    activation: KernelSpec(
        name=f"{activation}_and_mul",
        source="activation/act_and_mul.cu",
        entry="act_and_mul",
        parameters=declare(outputs("out"), inputs("x"), derived("int64", *_SIZES)),
        params={"scalar_t": list(DTYPES), "activation": [activation]},
        bind=partial(_bind, {"activation": activation}),
        geometry=_geometry,
        cost=_cost,
        reference=partial(act_and_mul_reference, activation),
        make_inputs=cases.act_and_mul_inputs,
        sizes=cases.SIZES,
        bench_sizes=cases.BENCH_SIZES,
        tolerance=_TOLERANCE,
        paper="https://arxiv.org/abs/2002.05202",
    )
    for activation in ACTIVATIONS
}
CLAMPED_SWIGLU = KernelSpec(
    name="clamped_swiglu",
    source="activation/clamped_swiglu.cu",
    entry="clamped_swiglu",
    parameters=declare(
        outputs("out"),
        inputs("x"),
        derived("int64", *_SIZES),
        values("float", "alpha", "limit"),
    ),
    params={"scalar_t": list(DTYPES)},
    bind=partial(_bind, {}),
    geometry=_geometry,
    cost=_cost,
    reference=clamped_swiglu_reference,
    make_inputs=cases.clamped_swiglu_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.CLAMPED_BENCH_SIZES,
    tolerance=_TOLERANCE,
    paper="https://arxiv.org/abs/2508.10925",
)
SPECS = [*BY_ACTIVATION.values(), CLAMPED_SWIGLU]
define(SPECS)
