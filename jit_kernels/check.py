"""Run a kernel's own source on the CPU in its checked form, over all cases and many schedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations

import torch

from kiln.cache.env import Env
from kiln.jit_kernels.errors import KernelError
from kiln.jit_kernels.parameters import Arguments
from kiln.jit_kernels.parity import error_of, expected, poisoned_inputs
from kiln.jit_kernels.spec import KernelSpec, Sizes, Variant, label
from kiln.jit_kernels.template import Unit, render
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import HostKernel

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Finding:
    """What went wrong in one case, and the first seed of the schedule that shows it."""

    case: str
    seed: int
    report: str


def covering_variants(spec: KernelSpec) -> list[Variant]:
    """Return variants in which every pair of two parameters' values occurs; few of very many."""

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
    """Run every variant at every size under seeds 0 .. seeds-1; return what was found.

    Outputs start as NaN. A run fails when the checker reports (races by scope, bounds, alignment,
    uninitialised shared memory, divergence, deadlock), when a result leaves the spec's tolerance
    against float64, and when a byte changes that the operator does not own, such as the gaps
    between strided rows. A case stops at its first failing seed. ``on_case`` hears of each case
    before it runs. ``unit_of`` may render something other than the shipped source. ``first_only``:
    stop at the first finding, of which the list has at most one then.

    Raises CompileError and ToolchainMissing, ValueError for less than one seed.
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
    with torch.random.fork_rng(devices=[]):  # the same inputs each time, and nobody else's changed
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
    """The storages behind some arguments: as they were, and which bytes the operator owns."""

    def __init__(self, spec: KernelSpec, a: Arguments) -> None:
        self._storages: dict[int, _Storage] = {}
        for name, value in a._asdict().items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes():
                start = value.untyped_storage().data_ptr()
                storage = self._storages.setdefault(start, _Storage(name, value))
                if name in spec.parameters.mutated:
                    storage.own(value)

    def restore(self) -> None:
        """Put every byte back as it was."""
        for storage in self._storages.values():
            storage.bytes.copy_(storage.saved)

    def stray_write(self) -> str | None:
        """Return a report of bytes that changed and are not the operator's, or None."""
        for storage in self._storages.values():
            changed = (storage.bytes != storage.saved) & ~storage.owned[: storage.bytes.numel()]
            if changed.any():
                first = int(changed.nonzero()[0])
                return (
                    f"stray write: {int(changed.sum())} bytes of {storage.name}'s memory changed "
                    f"that the operator must leave alone, the first at byte {first}"
                )
        return None


class _Storage:
    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self.saved = self.bytes.clone()
        size = -(-self.bytes.numel() // 16) * 16  # so that it can be seen as wider elements
        self.owned = torch.zeros(size, dtype=torch.bool)

    def own(self, view: torch.Tensor) -> None:
        """Mark the bytes that a view covers."""
        elements = self.owned.view(torch.int8).view(_INTEGERS[view.element_size()])
        ones = int.from_bytes(b"\x01" * view.element_size(), "little")  # each byte a true bool
        elements.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(ones)
