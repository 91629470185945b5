"""Build all declared kernels before serving. Needs no GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

from kiln.jit_kernels.compile.build import Built, build, build_unless_busy
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.declare.arch import compute_capability
from kiln.jit_kernels.declare.catalog import best_form
from kiln.jit_kernels.declare.errors import CompileError, KernelError, SealedMiss
from kiln.jit_kernels.declare.spec import KernelSpec, Needs, Variant, label

_MAX_JOBS = 8


@dataclass(frozen=True, slots=True)
class Job:
    """One build: a variant for a target."""

    spec: KernelSpec
    variant: Variant
    arch: str

    @property
    def name(self) -> str:
        """A short name for progress and errors."""
        return f"{label(self.spec, self.variant)} {self.arch}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job: a build, or the CompileError or SealedMiss."""

    job: Job
    built: Built | None
    error: KernelError | None = None


def jobs_for(
    specs: Iterable[KernelSpec], archs: Sequence[str], needs: Needs = MappingProxyType({})
) -> list[Job]:
    """Return the jobs of some specs for some targets, without kernels that a target never runs.

    Those are kernels that need a newer GPU, and kernels that another one replaces on the target.
    ``needs`` limits the jobs to a model's variants. Raises KernelError on a malformed target.
    """
    capabilities = {arch: compute_capability(arch) for arch in archs}
    return [
        Job(spec, variant, arch)
        for spec in specs
        for variant in spec.variants(needs)
        for arch, capability in capabilities.items()
        if spec.supports(arch, capability) and best_form(spec, variant, arch) is spec
    ]


def warm_up(
    jobs: Sequence[Job],
    cache: KernelCache,
    num_threads: int = 0,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Build all jobs in a thread pool; return the outcomes in order, and the seconds that it took.

    ``num_threads`` 0 means the number of cores, at most 8. Jobs that another process is building
    are retried last, so that processes that start together share the work. ``on_outcome`` is called
    from this thread as outcomes become available. Raises ToolchainMissing and BundleRefused.
    Compile errors and misses in a sealed cache are outcomes, not exceptions.
    """
    start = time.perf_counter()
    done: dict[int, Outcome] = {}
    left: Sequence[int] = range(len(jobs))
    with ThreadPoolExecutor(num_threads or min(os.cpu_count() or 1, _MAX_JOBS)) as pool:
        for make in (build_unless_busy, build):
            outcomes = pool.map(lambda index: _attempt(jobs[index], cache, make), left)  # noqa: B023
            for index, outcome in zip(left, outcomes, strict=True):
                if outcome is not None:
                    done[index] = outcome
                    on_outcome(outcome)
            left = [index for index in range(len(jobs)) if index not in done]
    return [done[index] for index in range(len(jobs))], time.perf_counter() - start


def _attempt(job: Job, cache: KernelCache, make: Callable[..., Built | None]) -> Outcome | None:
    """Return the outcome of a job, or None if another process is building it."""
    try:
        built = make(job.spec, job.variant, job.arch, cache)
    except (CompileError, SealedMiss) as error:
        return Outcome(job, None, error)
    return None if built is None else Outcome(job, built)
