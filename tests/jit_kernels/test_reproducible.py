"""Builds are reproducible and hermetic."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kiln.cache.disk.store import Store
from kiln.jit_kernels.compile.audit import audit, rebuild
from kiln.jit_kernels.compile.build import build
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.declare.errors import CompileError
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.toolchains import nvrtc
from kiln.jit_kernels.toolchains.template import Unit

ROOT = Path(__file__).resolve().parents[2]
ARCH = "sm_90a"
START = """
import json, sys
from kiln.jit_kernels.compile.open_cache import kernel_cache
from kiln.jit_kernels.compile.warmup import jobs_for, warm_up
from kiln.jit_kernels.registry import find_spec

jobs = jobs_for(map(find_spec, sys.argv[1:]), ["sm_80", "sm_90a"])
outcomes, _ = warm_up(jobs, kernel_cache())
print(json.dumps([one.built.tier for one in outcomes]))
"""


@pytest.fixture(scope="module")
def copy():
    """The package at another path that any user can read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for part in ("cache", "engine", "jit_kernels", "kernel_sources", "tools/import_root"):
            ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.egg-info")
            shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=ignored)
        shutil.copy(Path(__file__).with_name("build_all.py"), folder)
        shutil.copy(ROOT / "README.md", folder)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        yield folder


def digests(warm):
    keys = {job.name: build(job.spec, job.variant, job.arch, warm.cache()).key for job in warm.jobs}
    return {
        name: [keys[name], hashlib.sha256(cubin).hexdigest()]
        for name, cubin in warm.cubins.items()
        if name.endswith(ARCH)
    }


def run(script, root, environ, *user, cwd):
    done = subprocess.run(
        [sys.executable, str(script), ARCH, *map(str, user)],
        env={"PYTHONPATH": str(root / "tools/import_root"), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert Path(report["root"]) == root
    assert report["user"] == (user[0] if user and isinstance(user[0], int) else os.getuid())
    return report["built"]


def poison(folder):
    """Headers with the same names as Kiln's, in all folders that a compiler might search."""
    for place in ("", "kernel_sources/include/", "kernel_sources/norm/", "include/"):
        for name in ("kiln/rows/vec.cuh", "kiln/ptx/ptx.cuh", "kiln/math/reduce.cuh"):
            path = folder / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#error poisoned\n")
    (folder / "cuda_host.h").write_text("#error poisoned\n")
    return folder


def test_from_an_empty_environment_and_the_root_folder(warm):
    script = Path(__file__).with_name("build_all.py")
    built = run(script, ROOT, {}, "--one-of-each", *warm.kernels, cwd="/")
    assert {name.partition("[")[0] for name in built} == set(warm.kernels)
    assert built.items() <= digests(warm).items()


def test_a_header_that_is_not_passed_is_not_found_anywhere(monkeypatch, tmp_path):
    for place in ("", "kernel_sources/", "kernel_sources/norm/"):
        path = tmp_path / place / "kiln" / "found.cuh"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#define FOUND\n")
    monkeypatch.chdir(tmp_path)
    for name in ("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    text = '#include "kiln/found.cuh"\nextern "C" __global__ void f() {}'
    with pytest.raises(CompileError, match=r"kiln/found\.cuh"):
        nvrtc.compile_cubin("f", Unit("kernel_sources/norm/x.cu", text, {}), ARCH)


@pytest.mark.deep
def test_from_another_path_user_and_home_among_poisoned_headers_and_variables(warm, copy):
    here = poison(copy / "work")
    home = copy / "home"
    home.mkdir()
    here.chmod(0o755)
    # Root becomes a user without a passwd entry, who cannot write to that home.
    somebody = [54321] if os.geteuid() == 0 else []
    hostile = {
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        **dict.fromkeys(("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"), str(here)),
        **dict.fromkeys(("NVCC_APPEND_FLAGS", "NVRTC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"), "-G"),
    }
    built = run(copy / "build_all.py", copy, hostile, *somebody, cwd=here)
    assert built == digests(warm)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seconds", [0, 4102444800], ids=["1970", "2100"])
def test_no_time_of_a_file_and_no_unreached_file_makes_anything_compile_again(
    warm, copy, tmp_path, seconds
):
    root = shutil.copytree(warm.root, tmp_path / "kernels")
    for path in [*copy.rglob("*"), *root.rglob("*")]:
        if path.name in ("README.md", "cuda_host.h", "llm.py", "test_build.py"):
            path.write_text(path.read_text() + f"\n# {seconds}\n")
        os.utime(path, (seconds, seconds), follow_symlinks=False)
    (copy / "kernel_sources/include/kiln/unreached.cuh").write_text(f"// {seconds}\n")
    environ = {
        "PYTHONPATH": str(copy / "tools/import_root"),
        "KILN_KERNEL_CACHE_DIR": str(root),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", START, *warm.kernels]
    out = subprocess.check_output(command, env=environ, cwd="/", timeout=120)
    assert json.loads(out) == ["disk"] * len(warm.jobs)


@pytest.mark.parametrize("years", [-10, 10])
def test_a_clock_that_is_ten_years_off_makes_nothing_compile_again(
    warm, tmp_path, monkeypatch, years
):
    root, now = shutil.copytree(warm.root, tmp_path / "kernels"), time.time()
    monkeypatch.setattr(time, "time", lambda: now + years * 365 * 86400)
    store = Store(root)
    store.sweep()
    built = [build(job.spec, job.variant, job.arch, KernelCache(store)) for job in warm.jobs]
    assert all(one.tier == "disk" for one in built)


@pytest.mark.deep
def test_every_entry_is_what_would_be_built_again(warm, tmp_path):
    cache = warm.cache()
    assert audit(cache) == (len(warm.jobs), [])
    # One variant of each kernel: the test above rebuilds all of them at another path.
    jobs = {job.spec.name: job for job in warm.jobs if job.arch == ARCH}
    assert jobs.keys() == all_specs().keys()
    assert rebuild(list(jobs.values()), cache) == (len(jobs), [])


def test_an_entry_that_would_be_built_otherwise_is_found(warm, tmp_path):
    job = warm.jobs[0]
    built = build(job.spec, job.variant, job.arch, warm.cache())
    entry = warm.cache().store.get(job.arch, built.key)
    forged = built.cubin.replace(b"ptxas", b"other")
    store = Store(tmp_path)
    store.put(job.arch, built.key, forged, entry.header)
    compared, flaws = rebuild([job, warm.jobs[1]], KernelCache(store))
    assert compared == 1, "what is not there is not compared"
    assert [flaw.where for flaw in flaws] == [job.name]

    header = {**entry.header, "ingredients": entry.header["ingredients"][:-1]}
    store = Store(tmp_path / "other")
    store.put(job.arch, built.key, built.cubin, header)
    store.put(job.arch, "0" * 64, b"\0" * 99, entry.header)
    count, flaws = audit(KernelCache(store))
    assert count == 2
    assert sorted(flaw.reason for flaw in flaws) == [
        "its ingredients do not hash to its key",
        "not an ELF file for a CUDA device",
    ]
