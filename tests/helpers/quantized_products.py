"""Products with quantised weights: random ones whose bits tell much, and scenarios for faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from unittest.mock import patch

import torch

from kiln.jit_kernels.declare.errors import HostFault
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.parity import error_of, expected, poison
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import HOST_GPU, KernelSpec, Variant, label
from kiln.jit_kernels.ops.quantized_linear import spec as declared
from kiln.jit_kernels.ops.quantized_linear.cases import BITS
from kiln.jit_kernels.ops.quantized_linear.spec import QUANTIZED_GEMM
from kiln.jit_kernels.ops.shared.four_bits import CHUNK
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import HostKernel, World
from kiln.jit_kernels.toolchains.template import Unit, render

_LIFT = 2.0**10  # above the subnormal numbers of fp16
UnitOf = Callable[..., Unit]


def random_products(variant: Variant, count: int) -> Iterator[tuple[Arguments, random.Random]]:
    """Yield products without experts, and a source of further choices.

    In most of them all that is left is the rounding of float32: it differs in another order.
    """
    chance = random.Random(str(sorted(variant.items())))
    for number in range(count):
        inputs = chance.choice((chance.randint(17, 40), 8 * chance.randint(32, 40))) * 8
        sizes = {"rows": chance.randint(1, 70), "outputs": chance.randint(1, 150), "experts": 0}
        sizes |= {"inputs": inputs, "zeros": chance.randint(0, 1), "bias": chance.randint(0, 1)}
        if BITS[variant["weight"]] == 8:
            sizes |= {"inputs": -(-inputs // 16) * 16, "by_row": number % 2, "more": number % 3}
        torch.manual_seed(chance.randrange(2**31))
        a = QUANTIZED_GEMM.make_arguments(variant, sizes, "cpu")
        yield (_cancelling(a) if number % 3 else a), chance


def _cancelling(a: Arguments) -> Arguments:
    """Return a product whose second half, in whole chunks, is the first with another sign."""
    half = a.x.shape[1] // CHUNK // 2 * CHUNK
    if not half:
        return a
    a.x[:, half : 2 * half] = -a.x[:, :half]
    a.x[:, 2 * half :] = 0
    width = half // 2 if a.codes.dtype == torch.uint8 else half  # of the codes of as many inputs
    a.codes[:, width : 2 * width] = a.codes[:, :width]
    columns = half // CHUNK if a.codes.dtype != torch.uint8 and a.scales.shape[1] > 1 else 0
    if a.codes.dtype == torch.uint8:
        columns = a.scales.shape[1] * half // (a.codes.shape[1] * 2)
    for kept in (a.scales, a.zeros):
        if kept is not None and columns:
            kept[:, columns : 2 * columns] = kept[:, :columns]
    if a.scales.dtype == torch.uint8:
        a.scales.add_(10)
    else:
        a.scales.mul_(_LIFT)
    return a._replace(bias=None)


def bits(
    a: Arguments, seed: int = 0, *, whole: bool = False, unit_of: UnitOf = render
) -> torch.Tensor:
    """Run the kernel under the checker; return the bits of its result.

    ``whole``: one block multiplies all slices, as if there were many tiles.
    """
    many = 0 if whole else declared._MANY_BLOCKS
    with patch.object(declared, "_MANY_BLOCKS", many):
        variant = QUANTIZED_GEMM.bind(a).variant
        host.launch(_built(unit_of, QUANTIZED_GEMM, variant), QUANTIZED_GEMM, a, seed=seed)
    return a.out.clone(memory_format=torch.contiguous_format).view(torch.int16)


def of_rows(a: Arguments, rows: Sequence[int]) -> Arguments:
    """Return the product of some rows, in an order."""
    return a._replace(x=a.x[rows], out=torch.empty_like(a.out[: len(rows)]))


def _built(unit_of: UnitOf, spec: KernelSpec, variant: Variant) -> HostKernel:
    unit, name = unit_of(spec, variant), label(spec, variant)
    return host.build(unit, spec.entry, spec.c_types, name=name, checked=True, env=settings())


def whole(
    unit_of: UnitOf, kernels: Sequence[str], seed: int, *, needs: Mapping[str, str]
) -> str | None:
    """Multiply with a block for each slice, and with one for all; return what differs."""
    variant = next(QUANTIZED_GEMM.variants(needs))
    for a, chance in random_products(variant, 6):
        row = chance.randrange(len(a.x))
        try:
            wanted = bits(a, seed, unit_of=unit_of)
            alone = bits(of_rows(a, [row]), seed, whole=True, unit_of=unit_of)
            together = bits(a, seed, whole=True, unit_of=unit_of)
        except HostFault as fault:
            return str(fault)
        if not torch.equal(together, wanted):
            return f"{tuple(a.x.shape)} has other bits"
        if not torch.equal(alone[0], wanted[row]):
            return f"row {row} of {tuple(a.x.shape)} has other bits alone"
    return None


def chained(unit_of: UnitOf, kernels: Sequence[str], seed: int) -> str | None:
    """Launch a product, then, early, one whose x is its result; return what went wrong."""
    variant = next(QUANTIZED_GEMM.variants({"group": "64"}))
    torch.manual_seed(seed)
    sizes = {"rows": 3, "outputs": 136, "inputs": 136, "experts": 0}
    ahead, second = (QUANTIZED_GEMM.make_arguments(variant, sizes, "cpu") for _ in range(2))
    second = second._replace(x=ahead.out)
    built = _built(unit_of, QUANTIZED_GEMM, variant)
    return _launched(seed, second, (QUANTIZED_GEMM, built, ahead), (QUANTIZED_GEMM, built, second))


def sorted_ahead(unit_of: UnitOf, kernels: Sequence[str], seed: int) -> str | None:
    """Launch the kernel that counts the rows of experts, then, early, their product."""
    align, variant = find_spec("align_tokens"), next(QUANTIZED_GEMM.variants({"group": "64"}))
    torch.manual_seed(seed)
    sizes = {"tokens": 12, "top_k": 1, "experts": 3, "block_size": 1, "skew": 0, "holes": 0}
    ahead = align.make_arguments({}, sizes, "cpu")
    ahead.expert_ends.zero_()
    shape = {"rows": 12, "outputs": 24, "inputs": 136, "experts": 3}
    a = QUANTIZED_GEMM.make_arguments(variant, shape, "cpu")._replace(ends=ahead.expert_ends)
    return _launched(
        seed,
        a,
        (align, host.load(align, {}, checked=True, env=settings()), ahead),
        (QUANTIZED_GEMM, _built(unit_of, QUANTIZED_GEMM, variant), a),
    )


def _launched(
    seed: int, a: Arguments, *calls: tuple[KernelSpec, HostKernel, Arguments]
) -> str | None:
    """Launch calls, each early, of which the last is ``a``; return what went wrong with that."""
    world = World(checked=True, seed=seed)
    poison(a.out)
    for spec, kernel, arguments in calls:
        bound = spec.bind(arguments)
        geometry = spec.geometry(bound.variant, bound.sizes, HOST_GPU)
        values = spec.kernel_values(arguments, bound)
        world.enqueue(0, kernel, geometry, values, overlaps=True)
    try:
        world.run()
    except HostFault as fault:
        return str(fault)
    variant = QUANTIZED_GEMM.bind(a).variant
    parity = error_of(QUANTIZED_GEMM, variant, a, expected(QUANTIZED_GEMM, a))
    return None if parity.holds else f"wrong result: error {parity.error:.3g}"
