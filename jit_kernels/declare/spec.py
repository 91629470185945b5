"""The declaration of a kernel: everything that the rest of Kiln needs to know about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any

import torch

from kiln.jit_kernels.declare.errors import NoSuchKernel
from kiln.jit_kernels.declare.parameters import Arguments, KernelValue, Parameters

Variant = Mapping[str, str]  # compile-time values of one program, e.g. {"scalar_t": "kiln::bf16"}
Sizes = Mapping[str, int]  # run-time sizes of one call, e.g. {"rows": 64, "d": 4096}
# The compile-time values that a model needs, e.g. {"head_dim": "128"}; one or several per name.
Needs = Mapping[str, str | Collection[str]]
Results = Mapping[str, torch.Tensor]  # new values of what an operator writes, by name

SCALARS = MappingProxyType(
    {torch.float32: "float", torch.float16: "kiln::fp16", torch.bfloat16: "kiln::bf16"}
)
DTYPES = MappingProxyType({name: dtype for dtype, name in SCALARS.items()})


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a launch geometry may depend on. Units: multiprocessors, bytes per block."""

    num_multiprocessors: int
    max_shared_bytes: int


# The GPU that the host toolchain simulates.
HOST_GPU = Gpu(num_multiprocessors=4, max_shared_bytes=227 * 1024)


@dataclass(frozen=True, slots=True)
class LaunchGeometry:
    """Grid and block in CUDA's own terms. Units: blocks, threads, bytes.

    ``cooperative``: all blocks run at the same time, or the launch is refused. ``gpus_along_y``:
    each blockIdx.y stands for a GPU of its own, so gpu scope does not reach from one to another.
    Such a launch on one GPU waits for launches on the others: see ``one_gpu_of_several``.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    cooperative: bool = False
    gpus_along_y: bool = False

    @property
    def one_gpu_of_several(self) -> bool:
        """Whether this is one rank of a group whose other ranks run launches of their own."""
        return self.gpus_along_y and self.grid[1] == 1


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call must move and compute, for the roofline. Units: bytes, operations."""

    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Bound:
    """One call, ready to launch: its variant, its sizes, and its derived parameters by name."""

    variant: Variant
    sizes: Sizes
    derived: Mapping[str, KernelValue]


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpec:
    """A kernel's declaration.

    ``parameters`` lists the parameters of the kernel and its operator, in the order of the ``.cu``
    file. Functions take a call's arguments as a namedtuple ``a`` and read ``a.out`` or ``a.x``. If
    they return values for several parameters, they return a mapping by name.

    ``params`` maps every compile-time parameter to all its values. ``kiln warmup`` builds their
    product, except variants that ``is_supported`` rejects. ``reference`` returns the new values of
    the outputs and in_outs. It computes in float32, or in float64 on float64 inputs. It is the test
    oracle, the CPU operator, and the "torch" choice of the toggle. ``tolerance`` is the largest
    error against float64 relative to max(|expected|, 1), for each dtype of ``scalar_t`` or for all;
    integers must be equal. If that measure does not fit, ``error`` computes another one from the
    arguments after the run and the reference's results.
    """

    name: str  # of torch.ops.kiln.<name>, of the tests, and of the benchmark's rows
    source: str  # path under kernel_sources/
    entry: str  # extern "C" symbol in that file
    parameters: Parameters
    params: Mapping[str, Sequence[str]]
    bind: Callable[[Arguments], Bound]
    geometry: Callable[[Variant, Sizes, Gpu], LaunchGeometry]
    cost: Callable[[Variant, Sizes], Cost]
    reference: Callable[[Arguments], Results]
    make_inputs: Callable[[Variant, Sizes, str], Mapping[str, Any]]  # (.., .., device)
    sizes: Sequence[Sizes]  # cases for tests
    bench_sizes: Sequence[Sizes]  # cases for benchmarks
    tolerance: Mapping[torch.dtype, float] | float
    is_supported: Callable[[Variant], bool] = lambda variant: True
    is_possible: Callable[[Variant], bool] = lambda some: True  # else no call has these values
    has_unfused_path: bool = False  # without a variant, other operators do its work
    min_arch: int = 75
    only_arch: str = ""  # the one target that has its instructions
    replaces: str = ""  # operator this kernel replaces on ``only_arch``; empty: none
    max_cpu_seconds: float = 0.25  # limit for compiling one variant on an idle machine
    shared_bytes: Callable[[Variant, Gpu], int] = lambda variant, gpu: 0  # maximum
    error: Callable[[Arguments, Results], float] | None = None
    any_order: bool = False  # of what it lists; ``error`` compares integers too
    bench_needs: Needs = field(default_factory=lambda: {"scalar_t": "kiln::bf16"})  # timed
    paper: str = ""  # where the algorithm comes from

    def variants(self, needs: Needs = MappingProxyType({})) -> Iterator[Variant]:
        """Yield every compile-time parameter assignment, or those that a model can run.

        Yields nothing if a model needs a value for which the kernel has no variant.
        """
        choices = (
            [value for value in values if value in needed(needs, name, [value])]
            for name, values in self.params.items()
        )
        for chosen in product(*choices):
            variant = MappingProxyType(dict(zip(self.params, chosen, strict=True)))
            if self.is_supported(variant):
                yield variant

    def lacking(self, needs: Needs) -> list[Variant]:
        """Return the combinations of needed values for which the kernel has no variant."""
        names = [name for name in self.params if name in needs]
        has = {tuple(variant[name] for name in names) for variant in self.variants(needs)}
        combined = product(*(needed(needs, name) for name in names))
        wanted = [dict(zip(names, one, strict=True)) for one in combined]
        possible = [one for one in wanted if self.is_possible(one)] or wanted
        return [one for one in possible if tuple(one.values()) not in has]

    def supports(self, arch: str, capability: int) -> bool:
        """Return whether the kernel can be compiled for a target of a compute capability."""
        return capability >= self.min_arch and self.only_arch in ("", arch)

    def has_variant(self, variant: Variant) -> bool:
        """Return whether the kernel can be built in a variant."""
        listed = all(variant[name] in values for name, values in self.params.items())
        return listed and self.is_supported(variant)

    def allowed_error(self, variant: Variant) -> float:
        """Return the largest allowed error of a variant against float64."""
        if isinstance(self.tolerance, Mapping):
            return self.tolerance[DTYPES[variant["scalar_t"]]]
        return self.tolerance

    @property
    def family(self) -> str:
        """The folder of the template: the module under ops/ and the name of the toggle."""
        return self.source.partition("/")[0]

    @property
    def c_types(self) -> tuple[str, ...]:
        """The C types of the kernel's parameters: pointer, int64, int32, float."""
        return self.parameters.c_types

    @property
    def operator(self) -> Callable[..., None]:
        """torch.ops.kiln.<name>, for calls with all arguments in order; ``define`` registers it."""
        found: Callable[..., None] = getattr(torch.ops.kiln, self.name).default
        return found

    def arguments(self, positional: Sequence[Any]) -> Arguments:
        """Return the operator's arguments as a namedtuple."""
        return self.parameters.Arguments(*positional)

    def make_arguments(self, variant: Variant, sizes: Sizes, device: str) -> Arguments:
        """Return fresh arguments of the operator from ``make_inputs``."""
        made = self.make_inputs(variant, sizes, device)
        return self.arguments(self.parameters.positional(made))

    def kernel_values(self, a: Arguments, bound: Bound) -> tuple[KernelValue, ...]:
        """Return the kernel's arguments for a call, in the order of its signature."""
        return self.parameters.kernel_values(a, bound.derived)


def needed(needs: Needs, name: str, default: Collection[str] = ()) -> Collection[str]:
    """Return a compile-time parameter's values that a model needs; ``default`` if unlimited."""
    wanted = needs.get(name, default)
    return (wanted,) if isinstance(wanted, str) else wanted


def check_needs(spec: KernelSpec, needs: Needs) -> None:
    """Raise NoSuchKernel if a kernel lacks a variant that a model needs."""
    for one in spec.lacking(needs):
        told = ", ".join(f"{name} {value}" for name, value in one.items())
        has = "; ".join(f"{name} {', '.join(spec.params[name])}" for name in one)
        raise NoSuchKernel(f"{spec.name} has no variant for {told} (it has {has})")


def needs_of(dtype: torch.dtype) -> Needs:
    """Return the compile-time values that a model's dtype fixes for every kernel."""
    return MappingProxyType({"scalar_t": SCALARS[dtype]})


def label(spec: KernelSpec, variant: Variant) -> str:
    """Return a short name of one variant, such as ``rms_norm[bf16]``."""
    return f"{spec.name}[{','.join(value.removeprefix('kiln::') for value in variant.values())}]"
