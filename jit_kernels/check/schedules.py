"""Run a kernel's own source on the CPU under the checker, over all cases and many schedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations

import torch

from kiln.cache.env import Env
from kiln.jit_kernels.declare.errors import KernelError
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.parity import error_of, expected, poisoned_inputs
from kiln.jit_kernels.declare.spec import KernelSpec, Sizes, Variant, label
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import HostKernel
from kiln.jit_kernels.toolchains.template import Unit, render

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Finding:
    """An error in one case, with the first scheduler seed that shows it."""

    case: str
    seed: int
    report: str


def covering_variants(spec: KernelSpec) -> list[Variant]:
    """Return a small set of variants that contains every pair of values of two parameters."""

    def pairs(variant: Variant) -> set[tuple[tuple[str, str], ...]]:
        return set(combinations(variant.items(), min(2, len(variant))))

    left = list(spec.variants())
    missing = set().union(*map(pairs, left))
    chosen = []
    while missing:
        best = max(left, key=lambda variant: len(pairs(variant) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen or left


def check_kernel(
    spec: KernelSpec,
    *,
    seeds: int,
    env: Env,
    variants: Iterable[Variant] | None = None,
    sizes: Sequence[Sizes] | None = None,
    on_case: Callable[[str], None] = lambda case: None,
    unit_of: Callable[[KernelSpec, Variant], Unit] = render,
    first_only: bool = False,
) -> list[Finding]:
    """Run every variant at every size under scheduler seeds 0 .. seeds-1; return the findings.

    Outputs are filled with NaN first. A run fails if the checker reports an error (a race by scope,
    bounds, alignment, uninitialised shared memory, divergence, deadlock), if a result exceeds the
    spec's tolerance against float64, or if a byte changes that the operator must not write, such as
    the gaps between strided rows. A case stops at its first failing seed. ``on_case`` is called
    with each case before it runs. ``unit_of`` may render other source than the shipped one.
    ``first_only``: stop at the first finding.

    Raises CompileError and ToolchainMissing, and ValueError for less than one seed.
    """
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}: at least one schedule must run")
    chosen = list(spec.variants() if variants is None else variants)

    def build(variant: Variant) -> HostKernel:
        unit, name = unit_of(spec, variant), label(spec, variant)
        return host.build(unit, spec.entry, spec.c_types, name=name, checked=True, env=env)

    findings = []
    with ThreadPoolExecutor(env.jit_jobs or min(os.cpu_count() or 1, 8)) as pool:
        for variant, kernel in zip(chosen, pool.map(build, chosen), strict=True):
            for case_sizes in spec.sizes if sizes is None else sizes:
                shape = " ".join(f"{name}={value}" for name, value in case_sizes.items())
                case = f"{kernel.name} {shape}"
                on_case(case)
                found = _check_case(spec, variant, case_sizes, kernel, seeds)
                if found is not None:
                    findings.append(Finding(case, *found))
                    if first_only:
                        return findings
    return findings


def _check_case(
    spec: KernelSpec, variant: Variant, sizes: Sizes, kernel: HostKernel, seeds: int
) -> tuple[int, str] | None:
    """Return the first failing seed and its report, or None."""
    with torch.random.fork_rng(devices=[]):  # same inputs each time; torch's RNG is restored
        torch.manual_seed(0)
        a = poisoned_inputs(spec, variant, sizes, "cpu")
    wanted = expected(spec, a)
    memory = _Memory(spec, a)
    for seed in range(seeds):
        memory.restore()
        try:
            host.launch(kernel, spec, a, seed=seed)
        except KernelError as error:
            return seed, str(error)
        parity = error_of(spec, variant, a, wanted)
        if not parity.holds:
            allowed = f"{parity.allowed:.3g} is allowed"
            return seed, f"wrong result: error {parity.error:.3g} against float64, {allowed}"
        stray = memory.stray_write()
        if stray is not None:
            return seed, stray
    return None


class _Memory:
    """The storages behind some arguments: saved bytes, and which the operator may write."""

    def __init__(self, spec: KernelSpec, a: Arguments) -> None:
        self._storages: dict[int, _Storage] = {}
        for name, value in a._asdict().items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes():
                start = value.untyped_storage().data_ptr()
                storage = self._storages.setdefault(start, _Storage(name, value))
                if name in spec.parameters.mutated:
                    storage.own(value)

    def restore(self) -> None:
        """Restore every byte."""
        for storage in self._storages.values():
            storage.bytes.copy_(storage.saved)

    def stray_write(self) -> str | None:
        """Return a report of bytes that changed but that the operator must not write, or None."""
        for storage in self._storages.values():
            changed = (storage.bytes != storage.saved) & ~storage.owned[: storage.bytes.numel()]
            if changed.any():
                first = int(changed.nonzero()[0])
                return (
                    f"stray write: {int(changed.sum())} bytes of {storage.name}'s memory changed "
                    f"that the operator must not write, the first at byte {first}"
                )
        return None


class _Storage:
    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self.saved = self.bytes.clone()
        size = -(-self.bytes.numel() // 16) * 16  # so that it can be viewed as wider elements
        self.owned = torch.zeros(size, dtype=torch.bool)

    def own(self, view: torch.Tensor) -> None:
        """Mark the bytes of a view as writable by the operator."""
        elements = self.owned.view(torch.int8).view(_INTEGERS[view.element_size()])
        ones = int.from_bytes(b"\x01" * view.element_size(), "little")  # one bool per byte
        elements.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(ones)
