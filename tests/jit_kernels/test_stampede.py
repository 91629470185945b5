"""Processes that start together share the builds and get the same cubins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from depth import at_depth

ROOT = Path(__file__).resolve().parents[2]
# Forked after the imports, which take longer than compiling; each child loads NVRTC.
STAMPEDE = """
import errno, fcntl, hashlib, json, os, sys
from pathlib import Path
from kiln.cache.disk.store import Store
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.warmup import jobs_for, warm_up
from kiln.jit_kernels.registry import all_specs

folder, processes, step, *trouble = Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[5:]
specs = [spec for spec in all_specs().values() if sys.argv[4] in (spec.family, "all")]
jobs = jobs_for(specs, ["sm_90a"])
# Of a kernel that is slow to compile one program: its others would say no more about the locks.
slow = {job.spec.name: job for job in jobs if job.spec.max_cpu_seconds > 0.5}
jobs = [job for job in jobs if job.spec.name not in slow] + list(slow.values())
jobs = jobs[::step]

def no_lock(fd, operation):
    name = trouble[os.getpid() % len(trouble)]
    raise OSError(getattr(errno, name), name)

if trouble:
    fcntl.flock = no_lock
(folder / "locks").mkdir(mode=0o700)
ready, start = os.pipe()
for index in range(processes):
    if os.fork():
        continue
    os.close(start)
    os.read(ready, 1)  # all children wait here until the parent closes its end
    outcomes, _ = warm_up(jobs, KernelCache(Store(folder / "k"), locks=folder / "locks"), 2)
    together = hashlib.sha256(b"".join(one.built.cubin for one in outcomes)).hexdigest()
    built = [one.job.name for one in outcomes if not one.built.hit]
    (folder / f"{index}.json").write_text(json.dumps([built, together]))
    os._exit(0)
os.close(start)
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(processes)]
print(json.dumps({"jobs": [job.name for job in jobs], "codes": codes}))
"""


def stampede(folder, processes, step, family, *trouble):
    """Start processes on one cold cache; return the jobs, and each process's builds and cubins."""
    out = subprocess.check_output(
        [sys.executable, "-c", STAMPEDE, str(folder), str(processes), str(step), family, *trouble],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "tools/import_root"),
            "OMP_NUM_THREADS": "1",
        },
        timeout=240,
    )
    report = json.loads(out)
    assert report["codes"] == [0] * processes
    reports = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert len(reports) == processes
    assert not list((folder / "k").rglob(".tmp-*"))
    return report["jobs"], reports


def test_cold_processes_compile_each_program_once(tmp_path):
    jobs, reports = stampede(tmp_path, *at_depth((6, 2, "norm"), (16, 1, "all")))
    built = [name for names, _ in reports for name in names]
    assert sorted(built) == sorted(jobs)
    assert len({together for _, together in reports}) == 1


@pytest.mark.deep
def test_without_locks_there_is_no_error_and_the_bytes_are_the_same(tmp_path):
    jobs, reports = stampede(tmp_path, 4, 9, "all", "ENOLCK", "EOPNOTSUPP")
    assert {name for names, _ in reports for name in names} == set(jobs)
    assert len({together for _, together in reports}) == 1
