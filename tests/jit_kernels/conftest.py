"""A kernel cache that is warm already, made once for all tests here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kiln.cache.store import Store
from kiln.jit_kernels.compile.bundling import export_bundle
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.warmup import Job, jobs_for, warm_up
from kiln.jit_kernels.registry import all_specs

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


@pytest.fixture(scope="session")
def warm(tmp_path_factory) -> Warm:
    folder = tmp_path_factory.mktemp("warm")
    cache = KernelCache(Store(folder / "kernels"))
    jobs = jobs_for(all_specs().values(), ARCHS)
    outcomes, _ = warm_up(jobs, cache)
    cubins = {outcome.job.name: outcome.built.cubin for outcome in outcomes}
    done = export_bundle(folder / "all.kpack", jobs, cache)
    assert done.written == len(jobs)
    return Warm(folder / "kernels", folder / "all.kpack", done.sha256, jobs, cubins)
