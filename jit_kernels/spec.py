"""The one description of a kernel: everything the rest of Kiln needs to know about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any

import torch

Variant = Mapping[str, str]  # compile-time values of one program, e.g. {"scalar_t": "kiln::bf16"}
Sizes = Mapping[str, int]  # run-time sizes of one call, e.g. {"rows": 64, "d": 4096}

SCALARS = MappingProxyType(
    {torch.float32: "float", torch.float16: "kiln::fp16", torch.bfloat16: "kiln::bf16"}
)
DTYPES = MappingProxyType({name: dtype for dtype, name in SCALARS.items()})


@dataclass(frozen=True, slots=True)
class LaunchGeometry:
    """Grid and block in CUDA's own terms. Units: blocks, threads, bytes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call must move and compute, for the roofline. Units: bytes, operations."""

    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Bound:
    """One call, ready to launch: the variant it needs, its sizes, its parameters' values.

    ``values`` are in the order of ``KernelSpec.arguments``.
    """

    variant: Variant
    sizes: Sizes
    values: tuple[torch.Tensor | int | float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpec:
    """A kernel's declaration.

    ``params`` names every compile-time parameter and all the values it may take; their product
    is what ``kiln warmup`` builds. ``reference`` takes the op's own arguments and returns the new
    values of ``mutates`` in order; it computes in float32, or in float64 on float64 inputs, and
    has four jobs: test oracle, CPU op, fake op, and the "torch" choice of the toggle.
    ``tolerance`` is the largest error against float64 relative to max(|expected|, 1), by dtype.
    """

    name: str  # torch.ops.kiln.<name>; the test id; the row of the bench table
    source: str  # path under kernel_sources/
    entry: str  # extern "C" symbol in that file
    schema: str  # torch.library schema: "(Tensor(a!) out, Tensor x) -> ()"
    arguments: Sequence[str]  # C types of the kernel's parameters: pointer, int64, int32, float
    params: Mapping[str, Sequence[str]]
    bind: Callable[..., Bound]  # the op's arguments -> one call
    geometry: Callable[[Variant, Sizes], LaunchGeometry]
    cost: Callable[[Variant, Sizes], Cost]
    reference: Callable[..., tuple[torch.Tensor, ...]]
    make_inputs: Callable[[Variant, Sizes, str], tuple[Any, ...]]  # (.., .., device) -> arguments
    sizes: Sequence[Sizes]  # cases for tests
    bench_sizes: Sequence[Sizes]  # cases for benchmarks
    tolerance: Mapping[torch.dtype, float]
    min_arch: int = 75
    paper: str = ""  # where the algorithm comes from

    def variants(self, dtype: torch.dtype | None = None) -> Iterator[Variant]:
        """Yield every compile-time parameter assignment, or those that a model of a dtype runs."""
        names = list(self.params)
        for values in product(*self.params.values()):
            variant = MappingProxyType(dict(zip(names, values, strict=True)))
            if dtype is None or variant.get("scalar_t", SCALARS[dtype]) == SCALARS[dtype]:
                yield variant

    @property
    def family(self) -> str:
        """The folder of the template: the module under ops/ and the name of the toggle."""
        return self.source.partition("/")[0]

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The op's argument names, in order."""
        return _parse(self.schema)[0]

    @property
    def mutates(self) -> tuple[str, ...]:
        """The names of the arguments that the op writes, in order."""
        return tuple(self.argument_names[position] for position in self.mutated_positions)

    @property
    def mutated_positions(self) -> tuple[int, ...]:
        """Where the arguments that the op writes stand among all."""
        return _parse(self.schema)[1]


@cache
def _parse(schema: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return a schema's argument names, and the positions of those it mutates."""
    inside = re.fullmatch(r"\((.*)\) -> \(\)", schema)
    if inside is None:
        raise ValueError(f"schema {schema!r} must read '(…) -> ()'")
    parts = [part.strip() for part in inside[1].split(",")]
    names = tuple(part.split()[-1].split("=")[0] for part in parts)
    return names, tuple(i for i, part in enumerate(parts) if "!" in part)


def label(spec: KernelSpec, variant: Variant) -> str:
    """Return a short name of one variant, such as ``rms_norm[bf16]``."""
    return f"{spec.name}[{','.join(value.removeprefix('kiln::') for value in variant.values())}]"
