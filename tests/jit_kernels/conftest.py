"""Every kernel built for every target, and a warm cache of it, made once for all tests here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kiln.cache.store import Store
from kiln.jit_kernels.compile.build import Built, build, header_of
from kiln.jit_kernels.compile.bundling import export_bundle
from kiln.jit_kernels.compile.ingredients import ingredients_of
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.warmup import Job, jobs_for
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.template import render
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


class Everything:
    """Programs by job, each built once by all processes that share a folder; with all cores.

    What a build took stands in a file beside the programs, for those who come after it.
    """

    def __init__(self, root: Path) -> None:
        for name in ("locks", "seconds"):
            (root / name).mkdir(mode=0o700, exist_ok=True)
        self._cache = KernelCache(Store(root / "kernels"), locks=root / "locks")
        self._seconds = root / "seconds"
        self._done: dict[str, Compiled] = {}

    def build(self, jobs: Iterable[Job]) -> None:
        missing = [job for job in jobs if job.name not in self._done]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for one in pool.map(self._compiled, missing):
                self._done[one.job.name] = one

    def __getitem__(self, job: Job) -> Compiled:
        self.build([job])
        return self._done[job.name]

    def _compiled(self, job: Job) -> Compiled:
        start = time.thread_time()
        built = build(job.spec, job.variant, job.arch, self._cache)
        seconds, note = time.thread_time() - start, self._seconds / built.key
        if not built.hit:
            note.write_text(str(seconds))
        elif note.exists():  # else its builder is still writing: it is measured there
            seconds = float(note.read_text() or 0)
        return Compiled(job, built, seconds)


@pytest.fixture(scope="session")
def everything(tmp_path_factory, request) -> Everything:
    """Build ahead what the tests of this session ask for one by one."""
    shared = request.config.getoption("programs")
    programs = Everything(shared or tmp_path_factory.mktemp("everything"))
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    asked = (call.params for call in calls if call is not None)
    programs.build(
        Job(call["spec"], call["variant"], call["arch"])
        for call in asked
        if {"spec", "variant", "arch"} <= call.keys()
    )
    return programs


@pytest.fixture(scope="session")
def warm(tmp_path_factory, everything) -> Warm:
    folder = tmp_path_factory.mktemp("warm")
    cache = KernelCache(Store(folder / "kernels"))
    jobs = jobs_for(all_specs().values(), ARCHS)
    everything.build(jobs)
    cubins = {job.name: everything[job].built.cubin for job in jobs}
    for job in jobs:
        unit = render(job.spec, job.variant)
        ingredients = ingredients_of(job.spec, unit, job.arch, nvrtc.identity())
        header = header_of(job.spec, job.variant, ingredients, cubins[job.name])
        assert cache.keep(job.arch, everything[job].built.key, cubins[job.name], header)
    done = export_bundle(folder / "all.kpack", jobs, cache)
    assert done.written == len(jobs)
    return Warm(folder / "kernels", folder / "all.kpack", done.sha256, jobs, cubins)
