"""The specs of the all-reduces. A launch runs all ranks of a group, or one of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from types import MappingProxyType

import torch

from kiln.jit_kernels.declare.errors import LaunchError
from kiln.jit_kernels.declare.parameters import (
    Arguments,
    Parameter,
    declare,
    derived,
    in_outs,
    inputs,
    operator_only,
    outputs,
    scratch,
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
from kiln.jit_kernels.ops.all_reduce import cases
from kiln.jit_kernels.ops.all_reduce.cases import world_of
from kiln.jit_kernels.ops.all_reduce.layout import (
    ALGORITHMS,
    MAX_WORLDS,
    PUSHES,
    TWO_SHOTS,
    Algorithm,
    Layout,
    vectors,
)
from kiln.jit_kernels.ops.all_reduce.record import FUSED
from kiln.jit_kernels.ops.all_reduce.reference import all_reduce_reference, fused_reference
from kiln.jit_kernels.ops.norm.factors import FACTORS, derived_of
from kiln.jit_kernels.ops.shared.row_geometry import team_size
from kiln.jit_kernels.torch_ops import define

_MAX_THREADS, _WARP = 512, 32
_TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}
# Four roundings: of the sum over ranks, of the new residual, of the norm, of its product.
_FUSED_TOLERANCE = {torch.float32: 8e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
_MAX_WORLDS = [str(most) for most in MAX_WORLDS]
_NEEDS = MappingProxyType({"scalar_t": "kiln::bf16", "max_world": "8"})
_PAPER = "https://arxiv.org/abs/2607.16100"


def _bind(a: Arguments, kept: Sequence[str]) -> Bound:
    ranks, n = a.x.shape
    layout, offsets = _layout(a.peers.numel(), a.max_blocks, a.push_bytes, a.pull_bytes)
    shard = -(-vectors(n * a.x.element_size()) // layout.world)
    strides = {"out_stride": a.out.stride(0), "x_stride": a.x.stride(0)}
    numbers = {"n": n, "shard": shard, **strides, **offsets}
    sizes = {"n": n, **_sizes(layout, ranks)}
    return Bound(_variant(a, layout), sizes, {name: numbers[name] for name in kept})


def _fused_bind(a: Arguments) -> Bound:
    ranks, rows, d = a.x.shape
    layout, offsets = _layout(a.peers.numel(), a.max_blocks, a.push_bytes, a.pull_bytes)
    strides = {f"{name}_stride": getattr(a, name).stride(0) for name in ("out", "residual", "x")}
    numbers = {"rows": rows, "d": d, "inverse_d": 1.0 / max(d, 1), **strides, **derived_of(a)}
    numbers |= {name: offsets[name] for name in (*_GROUP, *_PUSH)}
    return Bound(_variant(a, layout), {"rows": rows, "d": d, **_sizes(layout, ranks)}, numbers)


@cache
def _layout(
    world: int, max_blocks: int, push_bytes: int, pull_bytes: int
) -> tuple[Layout, dict[str, int]]:
    """Return a layout and the kernel arguments that follow from it."""
    layout = Layout(world, max_blocks, push_bytes, pull_bytes)
    names = ("flags_at", "push_at", "slot_bytes", "pull_at", "area_bytes")
    offsets = {name: getattr(layout, name) for name in names}
    return layout, {"world": world, "buffer_bytes": layout.num_bytes, **offsets}


def _variant(a: Arguments, layout: Layout) -> Variant:
    return {"scalar_t": SCALARS[a.out.dtype], "max_world": str(layout.max_world)}


def _sizes(layout: Layout, ranks: int) -> dict[str, int]:
    fewer = layout.max_world - layout.world
    return {"blocks": layout.max_blocks, "fewer": fewer, "alone": int(ranks == 1)}


def _count(variant: Variant, sizes: Sizes) -> int:
    return vectors(sizes["n"] * DTYPES[variant["scalar_t"]].itemsize)


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu, shards: int = 1) -> LaunchGeometry:
    """Return the same grid for every size, in threads that are as few as possible."""
    work = -(-_count(variant, sizes) // shards)
    threads = -(-work // (sizes["blocks"] * _WARP)) * _WARP
    return _grid(variant, sizes, gpu, min(max(threads, _WARP), _MAX_THREADS), empty=work == 0)


def _two_shot_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return _geometry(variant, sizes, gpu, world_of(variant, sizes))


def _fused_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    team = team_size(sizes["d"], DTYPES[variant["scalar_t"]].itemsize)
    return _grid(variant, sizes, gpu, team, empty=sizes["rows"] * sizes["d"] == 0)


def _grid(variant: Variant, sizes: Sizes, gpu: Gpu, threads: int, *, empty: bool) -> LaunchGeometry:
    blocks, ranks = sizes["blocks"], 1 if sizes["alone"] else world_of(variant, sizes)
    if ranks == 1 and blocks > gpu.num_multiprocessors:
        raise LaunchError(
            f"an all-reduce in {blocks} blocks on {gpu.num_multiprocessors} multiprocessors: its "
            "blocks must run at the same time; lower the layout's max_blocks"
        )
    grid = (0 if empty else blocks, ranks, 1)
    return LaunchGeometry(grid, (threads, 1, 1), cooperative=ranks > 1, gpus_along_y=True)


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    """Count x, out, and what ranks send, written and read; not that slots are cleared."""
    world, n = world_of(variant, sizes), sizes["n"]
    return _cost_of(variant, world, 2 * world * n, sent=world * (world - 1) * n)


def _two_shot_cost(variant: Variant, sizes: Sizes) -> Cost:
    world, n = world_of(variant, sizes), sizes["n"]
    return _cost_of(variant, world, 2 * world * n, sent=2 * (world - 1) * n)


def _fused_cost(variant: Variant, sizes: Sizes) -> Cost:
    world, n = world_of(variant, sizes), sizes["rows"] * sizes["d"]
    return _cost_of(variant, world, 4 * world * n + sizes["d"], sent=world * (world - 1) * n)


def _cost_of(variant: Variant, world: int, elements: int, sent: int) -> Cost:
    return Cost((elements + 2 * sent) * DTYPES[variant["scalar_t"]].itemsize + 8 * world, sent)


_GROUP, _PUSH = ("buffer_bytes", "world"), ("push_at", "slot_bytes")
_PULL = ("flags_at", "pull_at", "area_bytes")
_MESSAGE = ("n", "out_stride", "x_stride")


def _of_group(numbers: Sequence[str], own: Sequence[str] = ()) -> list[Parameter]:
    """Return the parameters from the buffers on.

    ``numbers``: sizes, strides and offsets that the kernel uses; ``own``: smaller ones.
    """
    return [
        *scratch("buffers"), *inputs("peers"), *scratch("record"), *derived("int64", *numbers),
        *derived("int32", *own, "world"), *values("int32", "first_rank", "limit_ms"),
        *operator_only("int64", "max_blocks", "push_bytes", "pull_bytes"),
    ]  # fmt: skip


def _spec(algorithm: Algorithm) -> KernelSpec:
    two_shot = algorithm in TWO_SHOTS
    numbers = (*_MESSAGE, "buffer_bytes", *(_PUSH if algorithm in PUSHES else _PULL))
    small = ("shard",) if two_shot else ()
    return KernelSpec(
        name=algorithm,
        source=f"all_reduce/{algorithm}.cu",
        entry=algorithm,
        parameters=declare(outputs("out"), inputs("x"), _of_group(numbers, small)),
        params={"scalar_t": list(DTYPES), "max_world": _MAX_WORLDS},
        bind=partial(_bind, kept=(*numbers, *small, "world")),
        geometry=_two_shot_geometry if two_shot else _geometry,
        cost=_two_shot_cost if two_shot else _cost,
        reference=all_reduce_reference,
        make_inputs=cases.push_inputs if algorithm in PUSHES else cases.pull_inputs,
        sizes=cases.SIZES,
        bench_sizes=cases.BENCH_SIZES,
        tolerance=_TOLERANCE,
        min_arch=80,
        max_cpu_seconds=0.3,
        bench_needs=_NEEDS,
        paper=_PAPER,
    )


BY_ALGORITHM = {algorithm: _spec(algorithm) for algorithm in ALGORITHMS}
FUSED_ALL_REDUCE_ADD_RMS_NORM = KernelSpec(
    name=FUSED,
    source=f"all_reduce/{FUSED}.cu",
    entry=FUSED,
    parameters=declare(
        outputs("out"),
        in_outs("residual"),
        inputs("x", "weight"),
        _of_group(
            ("rows", "d", "out_stride", "residual_stride", "x_stride", "buffer_bytes", *_PUSH)
        ),
        derived("float", "inverse_d"),
        FACTORS,
    ),
    params={"scalar_t": list(DTYPES), "max_world": _MAX_WORLDS},
    bind=_fused_bind,
    geometry=_fused_geometry,
    cost=_fused_cost,
    reference=fused_reference,
    make_inputs=cases.fused_inputs,
    sizes=cases.FUSED_SIZES,
    bench_sizes=cases.FUSED_BENCH_SIZES,
    tolerance=_FUSED_TOLERANCE,
    min_arch=80,
    max_cpu_seconds=0.4,
    bench_needs=_NEEDS,
    paper=_PAPER,
)
SPECS = [*BY_ALGORITHM.values(), FUSED_ALL_REDUCE_ADD_RMS_NORM]
define(SPECS)
