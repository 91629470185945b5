"""Build every declared kernel ahead of serving. Needs no GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kiln.cache.store import Store
from kiln.jit_kernels.arch import compute_capability
from kiln.jit_kernels.compile.build import Built, build
from kiln.jit_kernels.errors import CompileError
from kiln.jit_kernels.spec import KernelSpec, Variant, label

_MAX_JOBS = 8


@dataclass(frozen=True, slots=True)
class Job:
    """One program to build: a variant for a target."""

    spec: KernelSpec
    variant: Variant
    arch: str

    @property
    def name(self) -> str:
        """A short name for progress and errors."""
        return f"{label(self.spec, self.variant)} {self.arch}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one job went: what was built, or the message of the compile error."""

    job: Job
    built: Built | None
    error: str = ""


def jobs_for(specs: Iterable[KernelSpec], archs: Sequence[str]) -> list[Job]:
    """Return the programs of some specs for some targets, leaving out targets too old for one.

    Raises KernelError on a malformed target.
    """
    capabilities = {arch: compute_capability(arch) for arch in archs}
    return [
        Job(spec, variant, arch)
        for spec in specs
        for variant in spec.variants()
        for arch, capability in capabilities.items()
        if capability >= spec.min_arch
    ]


def warm_up(
    jobs: Sequence[Job],
    store: Store,
    num_threads: int = 0,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Build all jobs in a thread pool; return the outcomes in order, and the seconds it took.

    ``num_threads`` 0 takes the number of cores, at most 8. ``on_outcome`` is called from this
    thread, in order, as outcomes become available. Raises ToolchainMissing; a compile error is an
    outcome.
    """
    start = time.perf_counter()
    outcomes = []
    with ThreadPoolExecutor(num_threads or min(os.cpu_count() or 1, _MAX_JOBS)) as pool:
        for outcome in pool.map(lambda job: _attempt(job, store), jobs):
            outcomes.append(outcome)
            on_outcome(outcome)
    return outcomes, time.perf_counter() - start


def _attempt(job: Job, store: Store) -> Outcome:
    try:
        return Outcome(job, build(job.spec, job.variant, job.arch, store))
    except CompileError as error:
        return Outcome(job, None, str(error))
