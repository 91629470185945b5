"""Compiling does not change the process, its limits or the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from depth import at_depth

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, resource, sys, tempfile, threading
from concurrent.futures import ThreadPoolExecutor
from kiln.jit_kernels.toolchains.template import Unit, render
from kiln.jit_kernels.declare.errors import CompileError
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import nvrtc

fetch = nvrtc._fetch

def fetch_log_too(bindings, program, what):
    # The log of a clean build has one byte, and the interpreter shares bytes objects of one byte.
    fetch(bindings, program, "ProgramLog")
    return fetch(bindings, program, what)

compilations, threads = map(int, sys.argv[1:])
spec = find_spec("silu_and_mul")
unit = render(spec, next(spec.variants()))
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    nvrtc.compile_cubin("silu_and_mul", unit, "sm_90a")
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)

nvrtc._fetch = fetch_log_too
spec = find_spec("rms_norm")
units = [render(spec, variant) for variant in spec.variants()]
empty = Unit("empty.cu", 'extern "C" __global__ void f() {}', {})
nvrtc.compile_cubin("first", empty, "sm_80")  # what loading NVRTC opens stays open

limit = resource.getrlimit(resource.RLIMIT_STACK)
descriptors = os.listdir("/proc/self/fd")
limits, done = set(), threading.Event()

def watch():
    while not done.wait(0.0005):
        limits.add(resource.getrlimit(resource.RLIMIT_STACK))

watcher = threading.Thread(target=watch)
watcher.start()
for index in range(compilations):
    nvrtc.compile_cubin("rms_norm", units[index % 3], "sm_90a" if index % 2 else "sm_80")
    if index % 5 == 0:
        try:
            nvrtc.compile_cubin("bad", Unit("bad.cu", "not C++", {}), "sm_80")
        except CompileError:
            continue
        raise AssertionError("compiled nonsense")
done.set()
watcher.join()
assert limits == {limit}, (limits, limit)
assert os.listdir("/proc/self/fd") == descriptors, os.listdir("/proc/self/fd")
assert os.listdir(tempfile.gettempdir()) == [], os.listdir(tempfile.gettempdir())
assert os.listdir(os.environ["HOME"]) == [], os.listdir(os.environ["HOME"])
assert " ".encode()[0] == 32  # not b" " on the right: it would be the same, spoilt object

start = threading.Barrier(threads)

def compile_with_all(index):
    start.wait()
    return [nvrtc.compile_cubin("rms_norm", unit, "sm_90a") for unit in units[:2]]

with ThreadPoolExecutor(threads) as pool:
    results = list(pool.map(compile_with_all, range(threads)))
assert all(result == results[0] for result in results)
assert len(set(results[0])) == 2
assert os.listdir("/proc/self/fd") == descriptors
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The process that compiles: its first line is the page faults of a third compilation."""
    folder = tmp_path_factory.mktemp("hygiene")
    for name in ("tmp", "home"):
        (folder / name).mkdir()
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tools/import_root"),
        "TMPDIR": str(folder / "tmp"),
        "HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SCRIPT, *at_depth(("6", "4"), ("20", "8"))]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)


def test_a_compile_takes_the_memory_that_the_one_before_freed(done):
    """Otherwise each compile has 2,000 page faults: a tenth of its time."""
    assert int(done.stdout) < 500, done.stderr[-3000:]


def test_compilations_and_threads_leave_nothing_behind(done):
    assert done.returncode == 0, done.stderr[-3000:]
