"""Products of few rows: random ones whose bits tell much, and scenarios for planted faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kiln.jit_kernels.declare.errors import HostFault
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.parity import error_of, expected
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import HOST_GPU, KernelSpec, Variant, label
from kiln.jit_kernels.ops.activation.spec import BY_ACTIVATION
from kiln.jit_kernels.ops.linear.checks import inputs_of
from kiln.jit_kernels.ops.linear.reference import BLOCK
from kiln.jit_kernels.ops.linear.spec import GATED, SKINNY_GEMM
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import HostKernel, World
from kiln.jit_kernels.toolchains.template import Unit

_CHAINED = {"rows": 3, "outputs": 64, "inputs": 64}
GATED_SIZES = (
    {"rows": 1, "outputs": 8, "inputs": 64},
    {"rows": 3, "outputs": 40, "inputs": 1280, "bias": 1, "gap": 8, "zeros": 1},
    {"rows": 8, "outputs": 133, "inputs": 333, "bias": 1, "by_row": 1},
)
_LIFT = 2**10  # above the subnormal numbers of fp16


def random_products(variant: Variant, count: int) -> Iterator[tuple[Arguments, random.Random]]:
    """Yield products of eight rows in each tile, and a source of further choices.

    In most of them all that is left is the rounding of float32: it differs in another order.
    """
    chance = random.Random(str(sorted(variant.items())))
    for number in range(count):
        inputs = chance.choice((chance.randint(1, 300), 8 * chance.randint(1, 300), 2200, 4200))
        sizes = {"rows": 8, "outputs": chance.randint(1, 50), "inputs": inputs}
        sizes |= {
            "gap": chance.choice((0, 3, 8)),
            "bias": chance.randint(0, 1),
            "by_row": 1,
            "zeros": 1,
        }
        torch.manual_seed(chance.randrange(2**31))
        a = SKINNY_GEMM.make_arguments(variant, sizes, "cpu")
        yield (_cancelling(a) if number % 3 else a), chance


def _cancelling(a: Arguments) -> Arguments:
    """Return a product whose second half, in whole blocks, is the first with another sign."""
    step = 1 if a.scales is None else BLOCK
    inputs = a.x.shape[1]
    half = inputs // step // 2 * step
    word = torch.int16 if a.x_scales is None else torch.int8
    x, weight = a.x.view(word), a.weight.view(torch.int16 if a.scales is None else torch.int8)
    if a.x.dtype == torch.int8:
        x[:, half : 2 * half] = -x[:, :half].clamp_(min=-127)
    else:
        x[:, half : 2 * half] = x[:, :half] ^ torch.iinfo(word).min  # the sign
    x[:, 2 * half :] = 0
    places = half // 2 if a.weight.dtype == torch.uint8 else half
    weight[:, places : 2 * places] = weight[:, :places]
    for scales in (a.scales, a.zeros, a.x_scales):
        if scales is not None:
            group = inputs_of(a.weight) // scales.shape[1] if places < half else BLOCK
            of_half = half // group if scales.shape[1] > 1 else 0
            scales[:, of_half : 2 * of_half] = scales[:, :of_half]
    if a.scales is None:
        a.x.mul_(_LIFT)
    elif a.scales.dtype == torch.uint8:
        a.scales.add_(10)  # to the exponents: as much
    else:
        a.scales.mul_(_LIFT)
    return a._replace(bias=None)


def alone(
    unit_of: Callable[..., Unit], kernels: Sequence[str], seed: int, *, needs: Mapping[str, str]
) -> str | None:
    """Multiply 16 rows together and one of them alone; return whose bits differ."""
    spec = SKINNY_GEMM
    every = {"input": "Plain", "experts": "false", **needs}
    one, two = (next(spec.variants({**every, "tiles": tiles})) for tiles in ("1", "2"))
    for a, chance in random_products(two, 12):
        row = chance.randrange(len(a.x))
        own = a._replace(x=a.x[row : row + 1], out=a.out[row : row + 1].clone(), tiles=1)
        for variant, arguments in ((one, own), (two, a)):
            host.launch(built(unit_of, variant), spec, arguments, seed=seed)
        if not torch.equal(own.out.view(torch.int16), a.out[row : row + 1].view(torch.int16)):
            return f"row {row} of {tuple(a.x.shape)} has other bits alone"
    return None


def in_turn(
    unit_of: Callable[..., Unit], kernels: Sequence[str], seed: int, *, needs: Mapping[str, str]
) -> str | None:
    """Run a product with an activation behind it, and both in turn; return whose bits differ."""
    activation = needs["gate"]
    spec = GATED[activation]
    variant = next(spec.variants({"scalar_t": "kiln::bf16", **needs}))
    for sizes in GATED_SIZES:
        torch.manual_seed(seed)
        a = spec.make_arguments(variant, sizes, "cpu")
        wanted = one_after_the_other(activation, a)
        try:
            host.launch(built(unit_of, variant, spec), spec, a, seed=seed)
        except HostFault as fault:
            return str(fault)
        if not torch.equal(a.out.view(torch.int16), wanted.view(torch.int16)):
            return f"{sizes}: other bits than those of the product and then {activation}"
    return None


def one_after_the_other(activation: str, a: Arguments) -> torch.Tensor:
    """Return what a gated product of some arguments is, by two kernels."""
    both = a._replace(out=a.out.new_empty(len(a.x), len(a.weight)))
    host.run(SKINNY_GEMM, both, env=settings())
    gate = BY_ACTIVATION[activation]
    gated = gate.parameters.Arguments(a.out.new_empty(a.out.shape), both.out)
    host.run(gate, gated, env=settings())
    return gated.out


def built(
    unit_of: Callable[..., Unit], variant: Variant, spec: KernelSpec = SKINNY_GEMM
) -> HostKernel:
    """Compile a variant under the checker, with the source that ``unit_of`` renders."""
    name = label(spec, variant)
    unit = unit_of(spec, variant)
    return host.build(unit, spec.entry, spec.c_types, name=name, checked=True, env=settings())


def chained(unit_of: Callable[..., Unit], kernels: Sequence[str], seed: int) -> str | None:
    """Launch a product, then, early, one whose x is its result; return what went wrong."""
    spec = SKINNY_GEMM
    variant = next(spec.variants({"scaled": "kNone", "experts": "false"}))
    torch.manual_seed(seed)
    ahead, second = (spec.make_arguments(variant, _CHAINED, "cpu") for _ in range(2))
    second = second._replace(x=ahead.out)
    kernel = built(unit_of, variant)
    world = World(checked=True, seed=seed)
    for a in (ahead, second):
        bound = spec.bind(a)
        geometry = spec.geometry(bound.variant, bound.sizes, HOST_GPU)
        world.enqueue(0, kernel, geometry, spec.kernel_values(a, bound), overlaps=True)
    try:
        world.run()
    except HostFault as fault:
        return str(fault)
    parity = error_of(spec, variant, second, expected(spec, second))
    return None if parity.holds else f"wrong result: error {parity.error:.3g}"


def planted(scaled: str, name: str, old: str, new: str, *more: Any) -> dict[str, Any]:
    """Return arguments of Fault; ``more``: cases, and values of the variant or other arguments."""
    fault: dict[str, Any] = {"kernel": "skinny_gemm", "name": name, "old": old, "new": new}
    needs = {"scalar_t": "kiln::bf16", "scaled": scaled, "tiles": "1", "experts": "false"}
    for one in more:
        if isinstance(one, list):
            fault["sizes"] = one
        else:
            (needs if one.keys() <= SKINNY_GEMM.params.keys() else fault).update(one)
    return {**fault, "needs": needs}
