"""Rows of experts and exact results of skinny_gemm, for its tests and for planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from skinny_products import built

from kiln.jit_kernels.declare.errors import HostFault
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.parity import error_of, expected
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import DTYPES, HOST_GPU, Variant
from kiln.jit_kernels.ops.dequantize.reference import codes_of, scale_values
from kiln.jit_kernels.ops.linear.cases import padded, shape_of_scales, shape_of_x
from kiln.jit_kernels.ops.linear.spec import SKINNY_GEMM
from kiln.jit_kernels.ops.shared.four_bits import pack_codes
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import World
from kiln.jit_kernels.toolchains.template import Unit

COUNTS = (1, 0, 8, 9, 0, 16, 17, 40)  # rows of experts: none, and of up to three tiles and more
BEHIND = 3  # rows of x that belong to no expert
UNWRITTEN = 7.0
MANY = (*[0] * 30, 1, 2, *[0] * 70, 9, *[0] * 40, 17, 0)  # more experts than rows
_OF_EXPERT = ("weight", "scales", "zeros", "bias")


def grouped(
    variant: Variant, counts: Sequence[int] = COUNTS, *, outputs: int = 20, inputs: int = 200
) -> Arguments:
    """Return a product of experts with so many rows, and rows of NaN behind them all."""
    rows = sum(counts) + BEHIND
    sizes = {"grouped": rows, "experts": len(counts), "outputs": outputs, "inputs": inputs}
    a = SKINNY_GEMM.make_arguments(variant, sizes | {"bias": 1, "gap": 8, "zeros": 1}, "cpu")
    if a.x_scales is None:
        a.x[rows - BEHIND :] = torch.nan
    else:
        a.x.view(torch.uint8)[rows - BEHIND :] = 0x7F  # NaN
        a.x_scales[rows - BEHIND :] = torch.nan
    a.out.fill_(UNWRITTEN)
    of_each = torch.tensor(counts)
    expert_of = torch.full((rows,), -(2**31), dtype=torch.int32)
    expert_of[: rows - BEHIND] = torch.arange(len(counts)).repeat_interleave(of_each)
    return a._replace(expert_of=expert_of, ends=of_each.cumsum(0).int())


def own_product(a: Arguments, row: int) -> Arguments:
    """Return the product of one row with the weights of its expert alone."""
    expert, rows = int(a.expert_of[row]), slice(row, row + 1)
    own = {name: getattr(a, name) for name in _OF_EXPERT}
    return a._replace(
        **{name: None if one is None else one[expert] for name, one in own.items()},
        x=a.x[rows],
        x_scales=None if a.x_scales is None else a.x_scales[rows],
        out=torch.empty_like(a.out[rows]),
        expert_of=None,
        ends=None,
        tiles=1,
    )


def exact_products(variant: Variant, inputs: int = 520) -> Iterator[tuple[Arguments, torch.Tensor]]:
    """Yield products with 4-bit codes, and their results, which no sum rounds before the last.

    x is of small whole numbers. Zero points are 0 to 16; scales are powers of two. Of E2M1 also the
    smallest scales, beside larger x.
    """
    torch.manual_seed(inputs)
    dtype, outputs = DTYPES[variant["scalar_t"]], 34
    rows = 3 if variant["tiles"] == "1" else 11
    sizes = {"rows": 1, "outputs": outputs, "inputs": inputs}
    shape, inputs = shape_of_scales(variant, sizes), shape_of_x(variant, sizes)[1]
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    whole = torch.randint(-4, 5, (rows, inputs)).double()
    is_e2m1 = variant["weight"] == "E2M1"
    lifts = (1, 2.0**100) if is_e2m1 and dtype == torch.bfloat16 else (1,)
    for lift in lifts:
        if is_e2m1:
            scales = torch.randint(0, 5, shape).add(125 if lift == 1 else 0).byte()
            scales[0] = scales.min()
        else:
            scales = torch.randint(-2, 2, shape).double().exp2().float()
        for zeros in (None,) if is_e2m1 else (None, every_zero(shape)):
            group = padded(variant, inputs) // shape[1]
            values = codes_of(codes, scales.dtype, inputs).double()
            if not is_e2m1:
                of_each = 8 if zeros is None else zeros.repeat_interleave(group, 1)[:, :inputs]
                values = values - of_each
            values *= scale_values(scales).double().repeat_interleave(group, 1)[:, :inputs]
            names = dict.fromkeys(SKINNY_GEMM.parameters.Arguments._fields)
            x = (whole * lift).to(dtype)
            names |= {"out": torch.zeros(rows, outputs, dtype=dtype), "x": x, "zeros": zeros}
            names |= {"weight": pack_codes(codes), "scales": scales, "tiles": int(variant["tiles"])}
            yield SKINNY_GEMM.parameters.Arguments(**names), (x.double() @ values.T).to(dtype)


def every_zero(shape: Sequence[int]) -> torch.Tensor:
    """Return zero points from 0 to 16, which differ from group to group."""
    return (torch.arange(shape[0]).unsqueeze(1) + 5 * torch.arange(shape[1])).short() % 17


def exact(
    unit_of: Callable[..., Unit], kernels: Sequence[str], seed: int, *, needs: Mapping[str, str]
) -> str | None:
    """Multiply whole numbers; return whether a result is not exact."""
    variant = next(SKINNY_GEMM.variants(needs))
    for a, want in exact_products(variant):
        host.launch(built(unit_of, variant), SKINNY_GEMM, a, seed=seed)
        if not torch.equal(a.out, want):
            return f"{int((a.out != want).sum())} results are not exact"
    return None


def of_experts(
    unit_of: Callable[..., Unit], kernels: Sequence[str], seed: int, *, needs: Mapping[str, str]
) -> str | None:
    """Multiply rows of experts; return what went wrong."""
    variant = next(SKINNY_GEMM.variants({**needs, "experts": "true"}))
    torch.manual_seed(seed)
    for counts, inputs in ((COUNTS, 200), (MANY, 8)):
        a = grouped(variant, counts, inputs=inputs)
        wanted = expected(SKINNY_GEMM, a)
        try:
            host.launch(built(unit_of, variant), SKINNY_GEMM, a, seed=seed)
        except HostFault as fault:
            return str(fault)
        if problem := _error(variant, a, wanted):
            return problem
    return None


def sorted_ahead(unit_of: Callable[..., Unit], kernels: Sequence[str], seed: int) -> str | None:
    """Launch the kernel that sorts rows by expert, then, early, their product."""
    align = find_spec("align_tokens")
    variant = next(SKINNY_GEMM.variants({"weight": "U4", "tiles": "1", "experts": "true"}))
    torch.manual_seed(seed)
    sizes = {"tokens": 12, "top_k": 1, "experts": 4, "block_size": 1, "skew": 0, "holes": 0}
    ahead = align.make_arguments({}, sizes, "cpu")
    ahead.expert_ends.zero_()
    ahead.expert_ids.zero_()
    shape = {"grouped": 12, "outputs": 24, "inputs": 136, "experts": 4}
    a = SKINNY_GEMM.make_arguments(variant, shape, "cpu")
    a = a._replace(expert_of=ahead.expert_ids[:12], ends=ahead.expert_ends)
    a.out.fill_(UNWRITTEN)
    world = World(checked=True, seed=seed)
    kernel = host.load(align, {}, checked=True, env=settings())
    calls = ((align, kernel, ahead), (SKINNY_GEMM, built(unit_of, variant), a))
    for spec, one, arguments in calls:
        bound = spec.bind(arguments)
        geometry = spec.geometry(bound.variant, bound.sizes, HOST_GPU)
        world.enqueue(0, one, geometry, spec.kernel_values(arguments, bound), overlaps=True)
    try:
        world.run()
    except HostFault as fault:
        return str(fault)
    return _error(variant, a, expected(SKINNY_GEMM, a))


def _error(variant: Variant, a: Arguments, wanted: Mapping[str, torch.Tensor]) -> str | None:
    parity = error_of(SKINNY_GEMM, variant, a, wanted)
    return None if parity.holds else f"wrong result: error {parity.error:.3g}"
