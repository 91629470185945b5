"""All-reduces among ranks that are streams of their own, as on several GPUs, on the host toolchain.

A launch of all ranks ends before the next one begins, so it cannot show a rank that is a call ahead
of another. Here each rank makes its calls in a stream of its own, and a seed interleaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from kiln.jit_kernels.declare.errors import HostFault
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import HOST_GPU, KernelSpec, Variant
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS, Layout
from kiln.jit_kernels.ops.all_reduce.members import Members, virtual_members
from kiln.jit_kernels.ops.all_reduce.record import LateRank, late_ranks
from kiln.jit_kernels.ops.all_reduce.reference import sum_ranks
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import HostKernel, World
from kiln.jit_kernels.toolchains.template import Unit, render

UnitOf = Callable[[KernelSpec, Variant], Unit]
WORD = {2: torch.int16, 4: torch.int32}


@dataclass
class Call:
    """A call of all ranks: its arguments by name, [world, ...] each, and what it must give."""

    kernel: str
    arguments: dict[str, Any]
    wanted: dict[str, torch.Tensor]

    @classmethod
    def of(cls, kernel: str, x: torch.Tensor) -> Call:
        """Return a call on x [world, n]; the fused kernel takes rows of 24 elements."""
        if kernel in ALGORITHMS:
            total = sum_ranks(x).expand_as(x)
            return cls(kernel, {"out": torch.full_like(x, torch.nan), "x": x}, {"out": total})
        x = x[:, : x.shape[1] // 24 * 24].unflatten(1, (-1, 24)).contiguous()
        residual, total = torch.randn(x.shape).to(x.dtype), sum_ranks(x).expand_as(x)
        factors = {"weight": torch.randn(24).to(x.dtype), "eps": 1e-5, "weight_offset": 0.0}
        factors |= {"round_once": x.shape[1] % 2 == 0}
        norm = find_spec("fused_add_rms_norm")
        rows = {"x": total.flatten(0, 1).clone(), "residual": residual.flatten(0, 1).clone()}
        a = norm.arguments(norm.parameters.positional(rows | factors))
        host.run(norm, a, env=settings())
        wanted = {"out": a.x.view_as(x), "residual": a.residual.view_as(x)}
        own = {"out": torch.full_like(x, torch.nan), "residual": residual, "x": x}
        return cls(kernel, own | factors, wanted)

    def is_right(self) -> bool:
        """Whether every rank has the wanted bits."""
        return all(same_bits(self.arguments[name], want) for name, want in self.wanted.items())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors are equal bit by bit; torch has other bits of NaN than the kernels."""
    equal = a.contiguous().view(WORD[a.element_size()]) == b.contiguous().view(
        WORD[b.element_size()]
    )
    return bool((equal | (a.isnan() & b.isnan())).all())


@dataclass
class Ranks:
    """A group of ranks in streams of their own. ``checked``: under the checker."""

    world: int
    max_bytes: int
    blocks: int = 2
    checked: bool = True
    calls: int = 0  # what the counters begin with
    unit_of: UnitOf = render
    members: Members = field(init=False)

    def __post_init__(self) -> None:
        layout = Layout(self.world, self.blocks, self.max_bytes, self.max_bytes)
        self.members = virtual_members(layout, "cpu", calls=self.calls)

    def run(
        self,
        calls: Sequence[Call],
        seed: int,
        *,
        absent: Sequence[int] = (),
        streams: int = 1,
        overlaps: bool = False,
    ) -> int:
        """Let each rank make the calls; return the number of thread switches. Raises HostFault.

        ``absent``: ranks that make none. ``streams``: of each rank; calls are dealt in turn, which
        breaks the rules of a group. ``overlaps``: launches may start early.
        """
        world = World(self.world * streams, seed=seed, checked=self.checked)
        world.allow(self.members.buffers)
        for number, call in enumerate(calls):
            for rank in range(self.world):
                if rank not in absent:
                    stream = rank * streams + number % streams
                    self._enqueue(world, stream, rank, call, overlaps=overlaps and number > 0)
        return world.run()

    def late(self) -> list[LateRank]:
        """Return the records."""
        return late_ranks(self.members.record)

    def _enqueue(self, world: World, stream: int, rank: int, call: Call, *, overlaps: bool) -> None:
        spec, rows, whole = find_spec(call.kernel), slice(rank, rank + 1), self.members
        own = Members(
            whole.layout, whole.buffers[rows], whole.peers - rank * whole.layout.num_bytes,
            whole.record[rows], rank,
        )  # fmt: skip
        named = {
            name: value[rows] if isinstance(value, torch.Tensor) and name != "weight" else value
            for name, value in call.arguments.items()
        }
        a = spec.arguments(spec.parameters.positional(named | own.arguments()))
        bound = spec.bind(a)
        kernel = kernel_of(spec, tuple(bound.variant.items()), self.unit_of, self.checked)
        geometry = spec.geometry(bound.variant, bound.sizes, HOST_GPU)
        world.enqueue(stream, kernel, geometry, spec.kernel_values(a, bound), overlaps=overlaps)


@cache
def kernel_of(
    spec: KernelSpec, variant: tuple[tuple[str, str], ...], unit_of: UnitOf, checked: bool
) -> HostKernel:
    """Return a kernel, perhaps with a fault, built for the host."""
    if unit_of is render:
        return host.load(spec, dict(variant), checked=checked, env=settings())
    unit = unit_of(spec, dict(variant))
    return host.build(
        unit, spec.entry, spec.c_types, name=spec.name, checked=checked, env=settings()
    )


def random_calls(
    kernels: Sequence[str], count: int, world: int, size: int, seed: int, dtype: torch.dtype
) -> list[Call]:
    """Return calls of these kernels in turn, on random messages of up to ``size`` elements."""
    chance = torch.Generator().manual_seed(seed)
    calls = []
    for number in range(count):
        n = size - int(torch.randint(size // 3, (), generator=chance))
        x = torch.randn(world, n, generator=chance).to(dtype)
        calls.append(Call.of(kernels[number % len(kernels)], x))
    return calls


def chained_calls(
    kernels: Sequence[str], count: int, world: int, size: int, seed: int, dtype: torch.dtype
) -> list[Call]:
    """Return calls of which each reads the result of the one before."""
    (call,) = calls = random_calls(kernels, 1, world, size, seed, dtype)
    while len(calls) < count:
        following = Call.of(kernels[0], call.wanted["out"].flatten(1))
        following.arguments["x"] = call.arguments["out"]
        calls.append(call := following)
    return calls


def special_calls(
    kernels: Sequence[str], count: int, world: int, size: int, seed: int, dtype: torch.dtype
) -> list[Call]:
    """Return calls on values that a sum could get wrong: zeros, infinities, NaN, subnormals, and
    words with the bits that mark what is not sent yet."""
    values = torch.tensor([0.0, -0.0, 1e-40, torch.inf, -torch.inf, torch.nan, 1.0, -1.0]).to(dtype)
    chance, calls = torch.Generator().manual_seed(seed), []
    for number in range(count):
        x = values[torch.randint(len(values), (world, size), generator=chance)]
        bits = x.view(WORD[x.element_size()])
        bits[0, 8:32] = bits[-1, 16:19] = -1
        calls.append(Call.of(kernels[number % len(kernels)], x))
    return calls


# ---- scenarios for planted faults: (unit_of, kernels, seed) -> what shows the fault, or None -----


def rounds(unit_of: UnitOf, kernels: Sequence[str], seed: int, **more: Any) -> str | None:
    """Several calls in a row; the first rank's counters begin shortly before they wrap."""
    world, size = more.pop("world", 3), more.pop("size", 150)
    start, count = more.pop("calls", 2**32 - 3), more.pop("count", 5)
    group = Ranks(world, 8 * size, calls=start, unit_of=unit_of, **more.pop("group", {}))
    calls = more.pop("make", random_calls)(kernels, count, world, size, seed, torch.bfloat16)
    try:
        group.run(calls, seed, **more)
    except HostFault as fault:
        return str(fault)
    if group.late():
        return f"late: {group.late()[0]}"
    wrong = [number for number, call in enumerate(calls) if not call.is_right()]
    return f"wrong result of call {wrong[0]}" if wrong else None


def absent(unit_of: UnitOf, kernels: Sequence[str], seed: int) -> str | None:
    """Rank 1 makes no call, then all make one: the record must say so, and nobody may wait again.

    The late call's own result is undefined; the call that follows must leave `out` alone.
    """
    group = Ranks(3, 1200, calls=7, unit_of=unit_of)
    first, second = (random_calls(kernels, 1, 3, 150, seed + i, torch.bfloat16) for i in range(2))
    want = {(rank, 1, kernels[0], 15) for rank in (0, 2)}
    try:
        group.run(first, seed, absent=[1])
        got = {(late.rank, late.missing, late.kernel, late.call) for late in group.late()}
        group.members.record.zero_()
        group.run(second, seed)
    except HostFault as fault:
        return str(fault)
    if got != want:
        return f"wrong record: {got}, want {want}"
    if group.late():
        return f"waited again: {group.late()[0]}"
    written = not bool(second[0].arguments["out"].isnan().all())
    return "a call after a late one wrote its result" if written else None
