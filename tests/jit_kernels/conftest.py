"""Programs and a warm cache of them, built once for all tests here."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from compile_yardstick import yardstick_seconds
from depth import at_depth

from kiln.cache.disk.store import Store
from kiln.jit_kernels.compile.build import Built, build, header_of
from kiln.jit_kernels.compile.bundling import export_bundle
from kiln.jit_kernels.compile.ingredients import ingredients_of
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.warmup import Job, jobs_for
from kiln.jit_kernels.registry import all_specs, find_spec
from kiln.jit_kernels.toolchains import nvrtc
from kiln.jit_kernels.toolchains.template import render

ARCHS = ("sm_80", "sm_90a")


@dataclass(frozen=True)
class Warm:
    """Kernels for two targets, in a folder and in a bundle. Read only: tests share it.

    One kernel is enough for most rules; deep runs have all of them.
    """

    kernels: list[str]
    root: Path
    bundle: Path
    sha256: str
    jobs: list[Job] = field(repr=False)
    cubins: dict[str, bytes] = field(repr=False)  # by the job's name

    def cache(self) -> KernelCache:
        """Return a cache on the folder, as in a new process."""
        return KernelCache(Store(self.root, mode="ro"))


@dataclass(frozen=True)
class Compiled:
    """The result of one build, and its compile time in units of the yardstick's CPU time."""

    job: Job
    built: Built
    cost: float


class Everything:
    """Programs by job, each built once by all processes that share a folder, on all cores.

    A file beside each program records its build time for the other processes.
    """

    def __init__(self, root: Path) -> None:
        for name in ("locks", "costs"):
            (root / name).mkdir(mode=0o700, exist_ok=True)
        self._cache = KernelCache(Store(root / "kernels"), locks=root / "locks")
        self._costs = root / "costs"
        self._done: dict[str, Compiled] = {}

    def build(self, jobs: Iterable[Job]) -> None:
        missing = [job for job in jobs if job.name not in self._done]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            built = list(pool.map(self._built, missing))
            # Run the yardstick once per ten programs compiled, on as many threads, so that load
            # slows both down.
            timed = sum(seconds is not None for _, seconds in built)
            yardsticks = pool.map(lambda _: yardstick_seconds(), range(-(-timed // 10)))
            yardstick = statistics.median([*yardsticks] or [1.0])
        for job, (one, seconds) in zip(missing, built, strict=True):
            self._done[job.name] = self._with_cost(job, one, seconds and seconds / yardstick)

    def __getitem__(self, job: Job) -> Compiled:
        self.build([job])
        return self._done[job.name]

    def cost_again(self, job: Job, rounds: int = 5) -> float:
        """Compile a program and the yardstick alternately; return and record the median ratio."""
        times = [(_seconds(job), yardstick_seconds()) for _ in range(rounds)]
        program, yardstick = (statistics.median(column) for column in zip(*times, strict=True))
        self._done[job.name] = self._with_cost(job, self[job].built, program / yardstick)
        return self._done[job.name].cost

    def _built(self, job: Job) -> tuple[Built, float | None]:
        start = time.thread_time()
        built = build(job.spec, job.variant, job.arch, self._cache)
        return built, None if built.hit else time.thread_time() - start

    def _with_cost(self, job: Job, built: Built, cost: float | None) -> Compiled:
        note = self._costs / built.key
        if cost is not None:
            note.write_text(str(cost))
        elif note.exists() and (text := note.read_text()):
            cost = float(text)
        else:  # built by another test, or its builder is still timing
            cost = _seconds(job) / yardstick_seconds()
        return Compiled(job, built, cost)


def _seconds(job: Job) -> float:
    """Return the CPU seconds of another build without a cache."""
    start = time.thread_time()
    build(job.spec, job.variant, job.arch, KernelCache(Store(None, mode="off")))
    return time.thread_time() - start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the test that happens to compile for all the others time for it."""
    for item in items:
        if "everything" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(at_depth(600, 3000)))


@pytest.fixture(scope="session")
def everything(request) -> Everything:
    """Build in parallel, in advance, the programs that this session's tests request one by one."""
    programs = Everything(request.config.getoption("programs"))
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
    kernels = at_depth(["rms_norm"], list(all_specs()))
    jobs = jobs_for(map(find_spec, kernels), ARCHS)
    everything.build(jobs)
    cubins = {job.name: everything[job].built.cubin for job in jobs}
    for job in jobs:
        unit = render(job.spec, job.variant)
        ingredients = ingredients_of(job.spec, unit, job.arch, nvrtc.identity())
        header = header_of(job.spec, job.variant, ingredients, cubins[job.name])
        assert cache.keep(job.arch, everything[job].built.key, cubins[job.name], header)
    done = export_bundle(folder / "all.kpack", jobs, cache)
    assert done.written == len(jobs)
    return Warm(kernels, folder / "kernels", folder / "all.kpack", done.sha256, jobs, cubins)
