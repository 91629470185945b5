"""The one description of a kernel: everything the rest of Kiln needs to know about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any

import torch

Variant = Mapping[str, str]  # compile-time values of one program, e.g. {"scalar_t": "kiln::bf16"}
Sizes = Mapping[str, int]  # run-time sizes of one call, e.g. {"rows": 64, "d": 4096}
Needs = Mapping[str, str]  # the compile-time values that a model fixes, e.g. {"head_dim": "128"}

SCALARS = MappingProxyType(
    {torch.float32: "float", torch.float16: "kiln::fp16", torch.bfloat16: "kiln::bf16"}
)
DTYPES = MappingProxyType({name: dtype for dtype, name in SCALARS.items()})


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a launch geometry may depend on. Units: multiprocessors, bytes a block."""

    num_multiprocessors: int
    max_shared_bytes: int


# What the host toolchain acts as.
HOST_GPU = Gpu(num_multiprocessors=4, max_shared_bytes=227 * 1024)


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

    ``params`` names every compile-time parameter and all the values it may take; their product,
    less what ``comes`` leaves out, is what ``kiln warmup`` builds. ``reference`` takes the op's
    own arguments and returns the new values of ``mutates`` in order; it computes in float32, or in
    float64 on float64 inputs, and has four jobs: test oracle, CPU op, fake op, and the "torch"
    choice of the toggle.
    ``tolerance`` is the largest error against float64 relative to max(|expected|, 1), by dtype of
    ``scalar_t`` or for all; integers must be equal. Where that measure does not fit, ``error``
    takes the operator's arguments after the run, and the reference's results, and gives its own.

    Names have meaning: what an operator mutates is poisoned with NaN before a test where its name
    starts with "out", and is scratch memory that the reference does not return where it starts
    with "workspace".
    """

    name: str  # torch.ops.kiln.<name>; the test id; the row of the bench table
    source: str  # path under kernel_sources/
    entry: str  # extern "C" symbol in that file
    schema: str  # torch.library schema: "(Tensor(a!) out, Tensor x) -> ()"
    arguments: Sequence[str]  # C types of the kernel's parameters: pointer, int64, int32, float
    params: Mapping[str, Sequence[str]]
    bind: Callable[..., Bound]  # the op's arguments -> one call
    geometry: Callable[[Variant, Sizes, Gpu], LaunchGeometry]
    cost: Callable[[Variant, Sizes], Cost]
    reference: Callable[..., tuple[torch.Tensor, ...]]
    make_inputs: Callable[[Variant, Sizes, str], tuple[Any, ...]]  # (.., .., device) -> arguments
    sizes: Sequence[Sizes]  # cases for tests
    bench_sizes: Sequence[Sizes]  # cases for benchmarks
    tolerance: Mapping[torch.dtype, float] | float
    comes: Callable[[Variant], bool] = lambda variant: True
    optional: bool = False  # others of the family do its work where no variant comes
    min_arch: int = 75
    only_arch: str = ""  # the one target that has its instructions
    instead_of: str = ""  # the operator that it runs for where it comes: "" is its own
    max_cpu_seconds: float = 0.25  # to compile one variant, on a quiet machine
    shared_bytes: Callable[[Variant, Gpu], int] = lambda variant, gpu: 0  # the most geometry asks
    error: Callable[[Sequence[Any], Sequence[torch.Tensor]], float] | None = None
    bench_needs: Needs = field(default_factory=lambda: {"scalar_t": "kiln::bf16"})  # what to time
    paper: str = ""  # where the algorithm comes from

    def variants(self, needs: Needs = MappingProxyType({})) -> Iterator[Variant]:
        """Yield every compile-time parameter assignment, or those that a model can run.

        There is none where a model needs a value that the kernel does not come in.
        """
        choices = (
            [value for value in values if needs.get(name, value) == value]
            for name, values in self.params.items()
        )
        for chosen in product(*choices):
            variant = MappingProxyType(dict(zip(self.params, chosen, strict=True)))
            if self.comes(variant):
                yield variant

    def comes_for(self, arch: str, capability: int) -> bool:
        """Return whether the kernel can be compiled for a target of a compute capability."""
        return capability >= self.min_arch and self.only_arch in ("", arch)

    def has_variant(self, variant: Variant) -> bool:
        """Return whether the kernel comes in a variant."""
        listed = all(variant[name] in values for name, values in self.params.items())
        return listed and self.comes(variant)

    def allowed_error(self, variant: Variant) -> float:
        """Return the largest error against float64 of a variant."""
        if isinstance(self.tolerance, Mapping):
            return self.tolerance[DTYPES[variant["scalar_t"]]]
        return self.tolerance

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
        return tuple(self.argument_names[position] for position in _parse(self.schema)[1])

    @property
    def results(self) -> tuple[str, ...]:
        """The names of those among them that the reference returns: all but scratch memory."""
        return tuple(self.argument_names[position] for position in self.result_positions)

    @property
    def result_positions(self) -> tuple[int, ...]:
        """Where the results stand among all arguments."""
        return _parse(self.schema)[2]


@cache
def _parse(schema: str) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """Return a schema's argument names, the positions of those it mutates, and of its results."""
    inside = re.fullmatch(r"\((.*)\) -> \(\)", schema)
    if inside is None:
        raise ValueError(f"schema {schema!r} must read '(…) -> ()'")
    parts = [part.strip() for part in inside[1].split(",")]
    names = tuple(part.split()[-1].split("=")[0] for part in parts)
    mutated = tuple(i for i, part in enumerate(parts) if "!" in part)
    return names, mutated, tuple(i for i in mutated if not names[i].startswith("workspace"))


def needs_of(dtype: torch.dtype) -> Needs:
    """Return what a model of a dtype fixes of every kernel."""
    return MappingProxyType({"scalar_t": SCALARS[dtype]})


def label(spec: KernelSpec, variant: Variant) -> str:
    """Return a short name of one variant, such as ``rms_norm[bf16]``."""
    return f"{spec.name}[{','.join(value.removeprefix('kiln::') for value in variant.values())}]"
