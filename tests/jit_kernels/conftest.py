"""Every kernel built for every target, and a warm cache of it, made once for all tests here."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kiln.cache.store import Store
from kiln.jit_kernels.arch import ALL_ARCHS
from kiln.jit_kernels.compile.build import Built, build, header_of
from kiln.jit_kernels.compile.bundling import export_bundle
from kiln.jit_kernels.compile.ingredients import ingredients_of
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.template import render
from kiln.jit_kernels.compile.warmup import Job, jobs_for
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.toolchains import nvrtc

ARCHS = ("sm_80", "sm_90a")


@dataclass(frozen=True)
class Warm:
    """Every kernel for two targets, in a folder and in a bundle. Read only: tests share it."""

    root: Path
    bundle: Path
    sha256: str
    jobs: list[Job] = field(repr=False)
    cubins: dict[str, bytes] = field(repr=False)  # by the job's name

    def cache(self) -> KernelCache:
        """Return the folder as a process that has just started sees it."""
        return KernelCache(Store(self.root, mode="ro"))


@dataclass(frozen=True)
class Compiled:
    """What came of one build, and the CPU time of the thread that NVRTC worked in."""

    job: Job
    built: Built
    cpu_seconds: float


@pytest.fixture(scope="session")
def everything(tmp_path_factory) -> dict[str, Compiled]:
    """Build every variant for every target, with all cores; by the job's name."""
    cache = KernelCache(Store(tmp_path_factory.mktemp("everything")))

    def compiled(job: Job) -> Compiled:
        start = time.thread_time()
        built = build(job.spec, job.variant, job.arch, cache)
        return Compiled(job, built, time.thread_time() - start)

    jobs = jobs_for(all_specs().values(), ALL_ARCHS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {one.job.name: one for one in pool.map(compiled, jobs)}


@pytest.fixture(scope="session")
def warm(tmp_path_factory, everything) -> Warm:
    folder = tmp_path_factory.mktemp("warm")
    cache = KernelCache(Store(folder / "kernels"))
    jobs = jobs_for(all_specs().values(), ARCHS)
    cubins = {job.name: everything[job.name].built.cubin for job in jobs}
    for job in jobs:
        unit = render(job.spec, job.variant)
        ingredients = ingredients_of(job.spec, unit, job.arch, nvrtc.identity())
        header = header_of(job.spec, job.variant, ingredients, cubins[job.name])
        assert cache.keep(job.arch, everything[job.name].built.key, cubins[job.name], header)
    done = export_bundle(folder / "all.kpack", jobs, cache)
    assert done.written == len(jobs)
    return Warm(folder / "kernels", folder / "all.kpack", done.sha256, jobs, cubins)
