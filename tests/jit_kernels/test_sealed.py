"""A machine without compilers runs from a sealed bundle and reports missing kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from depth import at_depth

from kiln.cache.disk.bundle import Bundle, write_bundle
from kiln.engine.cli.main import main
from kiln.jit_kernels.compile.open_cache import kernel_cache
from kiln.jit_kernels.declare.settings import settings

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = ("nvidia", "cuda", "cupy", "triton", "_cuda", "ninja")
WARM_START = """
import json, shutil, sys
from kiln.jit_kernels.compile.build import build
from kiln.jit_kernels.compile.open_cache import open_cache
from kiln.jit_kernels.compile.warmup import jobs_for
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.declare.settings import settings

jobs = jobs_for(map(find_spec, sys.argv[1:]), ["sm_80", "sm_90a"])[:64]
loaded = set(sys.modules)
calls = 0

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")

sys.setprofile(count)
cache = open_cache(settings())
built = [build(j.spec, j.variant, j.arch, cache) for j in jobs]
sys.setprofile(None)
maps = open("/proc/self/maps").read()
print(json.dumps({
    "kernels": len(built),
    "calls": calls,
    "tiers": sorted({one.tier for one in built}),
    "imported": sorted(n for n in set(sys.modules) - loaded if n.startswith(("cuda", "nvidia"))),
    "mapped": "libnvrtc" in maps,
    "tools": [t for t in ("nvcc", "gcc", "g++", "cc", "ninja", "ptxas") if shutil.which(t)],
}))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The environment of a machine without compilers: no PATH, no NVRTC, no bindings."""
    folder = tmp_path_factory.mktemp("bare")
    packages, empty = folder / "packages", folder / "bin"
    packages.mkdir()
    empty.mkdir()
    for name in {"purelib", "platlib"}:
        for path in Path(sysconfig.get_paths()[name]).iterdir():
            link = packages / path.name
            if not path.name.startswith(COMPILERS) and not link.exists():
                link.symlink_to(path)
    return {
        "PATH": str(empty),
        "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT / "tools/import_root")]),
        "KILN_KERNEL_CACHE_DIR": str(folder / "absent"),
        "KILN_KERNEL_CACHE": "sealed",
        "OMP_NUM_THREADS": "1",
    }


def run(environ, *command):
    """Without site: only the packages in the given environment."""
    return subprocess.run(
        [sys.executable, "-S", *command],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )


def kiln(environ, *arguments):
    return run(environ, "-m", "kiln.engine.cli.main", *arguments)


def test_kernels_resolve_where_there_is_no_compiler(warm, bare):
    environ = {**bare, "KILN_KERNEL_BUNDLE": str(warm.bundle)}
    environ["KILN_KERNEL_BUNDLE_SHA256"] = warm.sha256
    assert run(environ, "-c", "import cuda.bindings").returncode == 1
    done = run(environ, "-c", WARM_START, *warm.kernels)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["tiers"] == ["bundle"]
    assert (report["tools"], report["mapped"]) == ([], False)


@pytest.mark.deep
def test_a_warm_up_hits_every_kernel_where_there_is_no_compiler(warm, bare):
    environ = {**bare, "KILN_KERNEL_BUNDLE": str(warm.bundle)}
    done = kiln(environ, "warmup", "--arch", "sm_80,sm_90a", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert (counts["hit"], counts["failed"]) == (len(warm.jobs), 0)


@pytest.mark.deep
def test_one_missing_kernel_is_exit_code_3_with_the_ingredient_that_differs(warm, bare, tmp_path):
    entries = list(Bundle.open(warm.bundle).entries())
    entries = [e for e in entries if (e[0], e[2].header["kernel"]) != ("sm_90a", "rms_norm")]
    write_bundle(tmp_path / "less.kpack", entries)
    environ = {**bare, "KILN_KERNEL_BUNDLE": str(tmp_path / "less.kpack")}
    done = kiln(environ, "warmup", "--arch", "sm_80,sm_90a")
    assert done.returncode == 3, done.stderr[-2000:]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3
    assert errors[0].startswith("error: rms_norm[float] for sm_90a is not in the sealed")
    assert all("arch (the target): sm_90a here, sm_80 there" in line for line in errors)
    assert f"{len(warm.jobs) - 3} hit, 0 built, 3 failed" in done.stdout


def test_a_tampered_bundle_is_exit_code_4(warm, tmp_path, monkeypatch, capsys):
    data = bytearray(warm.bundle.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "tampered.kpack").write_bytes(data)
    monkeypatch.setenv("KILN_KERNEL_BUNDLE", str(tmp_path / "tampered.kpack"))
    settings.cache_clear()
    kernel_cache.cache_clear()
    try:
        assert main(["warmup"]) == 4
    finally:
        settings.cache_clear()
        kernel_cache.cache_clear()
    assert "tampered.kpack" in capsys.readouterr().err


@pytest.mark.quick(1)
@pytest.mark.parametrize("tier", ["disk", "bundle"])
def test_a_warm_start_is_few_calls_for_each_kernel_and_loads_no_compiler(warm, tier):
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tools/import_root"),
        "KILN_KERNEL_CACHE_DIR": str(warm.root),
        "OMP_NUM_THREADS": "1",
    }
    if tier == "bundle":
        environ["KILN_KERNEL_BUNDLE"] = str(warm.bundle)
    command = [sys.executable, "-c", WARM_START, *warm.kernels]
    report = json.loads(subprocess.check_output(command, env=environ, timeout=120))
    assert report["kernels"] == min(64, len(warm.jobs))
    most = at_depth(15_000, 64 * 750)  # with what a start does once
    if tier == "bundle":
        most += 300 * len(warm.jobs)  # it reads the whole index
    assert report["calls"] <= most
    assert report["tiers"] == [tier]
    assert (report["imported"], report["mapped"]) == ([], False)
