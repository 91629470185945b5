"""Keys name everything that goes into a build; builds go through the disk once."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kiln.cache.store import Store
from kiln.jit_kernels.compile import build as build_module
from kiln.jit_kernels.compile.build import build, key_of
from kiln.jit_kernels.compile.template import Unit, render
from kiln.jit_kernels.compile.warmup import jobs_for, warm_up
from kiln.jit_kernels.errors import CompileError, KernelError
from kiln.jit_kernels.registry import all_specs, find_spec
from kiln.jit_kernels.toolchains import nvrtc

ROOT = Path(__file__).resolve().parents[2]
SPEC = find_spec("rms_norm")
VARIANT = next(iter(SPEC.variants()))


def test_every_ingredient_changes_the_key(monkeypatch):
    unit = render(SPEC, VARIANT)
    keys = [key_of(SPEC, unit, "sm_90a"), key_of(SPEC, unit, "sm_90")]
    for header, text in unit.headers.items():
        changed = {**unit.headers, header: text + " "}
        keys.append(key_of(SPEC, dataclasses.replace(unit, headers=changed), "sm_90a"))
    keys.append(key_of(SPEC, dataclasses.replace(unit, text=unit.text + " "), "sm_90a"))
    keys.append(key_of(SPEC, dataclasses.replace(unit, name="other.cu"), "sm_90a"))
    keys.append(key_of(dataclasses.replace(SPEC, entry="other"), unit, "sm_90a"))
    monkeypatch.setattr(nvrtc, "identity", lambda: "nvrtc/other")
    keys.append(key_of(SPEC, unit, "sm_90a"))
    monkeypatch.undo()
    options = nvrtc.options("sm_90a")
    monkeypatch.setattr(nvrtc, "options", lambda arch: [*options, "-lineinfo"])
    keys.append(key_of(SPEC, unit, "sm_90a"))
    assert len(set(keys)) == len(keys)


def test_the_key_is_the_same_from_anywhere(tmp_path):
    code = (
        "from kiln.jit_kernels.registry import find_spec\n"
        "from kiln.jit_kernels.compile.build import key_of\n"
        "from kiln.jit_kernels.compile.template import render\n"
        "s = find_spec('rms_norm'); v = next(iter(s.variants()))\n"
        "print(key_of(s, render(s, v), 'sm_90a'))"
    )
    environ = {"PYTHONPATH": str(ROOT / "tools/import_root"), "CPATH": "/poisoned"}
    out = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=environ)
    assert out.decode().strip() == key_of(SPEC, render(SPEC, VARIANT), "sm_90a")


def test_a_hit_does_not_load_nvrtc(tmp_path, monkeypatch):
    store = Store(tmp_path)
    first = build(SPEC, VARIANT, "sm_90a", store)

    def fail(*args):
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "_bindings", fail)
    again = build(SPEC, VARIANT, "sm_90a", store)
    assert (again.cubin, again.hit) == (first.cubin, True)


def test_a_damaged_entry_is_compiled_again(tmp_path):
    store = Store(tmp_path)
    cubin = build(SPEC, VARIANT, "sm_90a", store).cubin
    path = store.path(key_of(SPEC, render(SPEC, VARIANT), "sm_90a"))
    path.write_bytes(path.read_bytes()[:-1])
    again = build(SPEC, VARIANT, "sm_90a", store)
    assert (again.cubin, again.hit) == (cubin, False)
    assert build(SPEC, VARIANT, "sm_90a", store).hit


def test_a_compile_error_speaks_in_the_authors_lines_and_is_never_published(tmp_path, monkeypatch):
    unit = render(SPEC, VARIANT)
    broken = dataclasses.replace(unit, text=unit.text.replace("sqrtf(", "sqrtff("))
    monkeypatch.setattr(build_module, "render", lambda spec, variant: broken)
    line = next(
        number
        for number, text in enumerate((ROOT / "kernel_sources" / SPEC.source).open(), 1)
        if "sqrtf(" in text
    )
    with pytest.raises(CompileError) as caught:
        build(SPEC, VARIANT, "sm_90a", Store(tmp_path))
    message = str(caught.value)
    assert f"kernel_sources/norm/rms_norm.cu({line})" in message
    assert "rms_norm[" in message
    assert "sm_90a" in message
    assert nvrtc.version() in message
    assert not list(tmp_path.rglob("*.kk"))


def test_warm_up_counts_failures_and_goes_on(tmp_path, monkeypatch):
    bad = dataclasses.replace(SPEC, source="norm/absent.cu")
    jobs = jobs_for([bad, SPEC], ["sm_80", "sm_90a"])
    outcomes, _ = warm_up(jobs, Store(tmp_path), 2)
    failed = [o for o in outcomes if o.built is None]
    assert len(outcomes) == 12
    assert len(failed) == 6
    assert "norm/absent.cu" in failed[0].error


def test_a_target_below_the_kernels_minimum_is_left_out():
    newer = dataclasses.replace(SPEC, min_arch=90)
    assert {job.arch for job in jobs_for([newer], ["sm_80", "sm_90a"])} == {"sm_90a"}
    with pytest.raises(KernelError, match="sm_xyz"):
        jobs_for([SPEC], ["sm_xyz"])


def test_a_second_process_compiles_nothing(tmp_path):
    environ = {
        **os.environ,
        "KILN_KERNEL_CACHE_DIR": str(tmp_path / "k"),
        "PYTHONPATH": str(ROOT / "tools/import_root"),
    }
    command = [
        sys.executable,
        "-m",
        "kiln.engine.cli.main",
        "warmup",
        "--arch",
        "sm_80,sm_90a",
        "--json",
    ]
    count = 2 * sum(len(list(spec.variants())) for spec in all_specs().values())
    reports = [
        json.loads(subprocess.check_output(command, env=environ, timeout=120)) for _ in range(2)
    ]
    cold, warm = reports
    assert set(cold) == {"kernels", "built", "hit", "failed", "seconds"}
    assert (cold["kernels"], cold["built"], cold["hit"], cold["failed"]) == (count, count, 0, 0)
    assert (warm["kernels"], warm["built"], warm["hit"], warm["failed"]) == (count, 0, count, 0)


def test_the_interpreter_is_unharmed_by_compiling():
    import resource

    before = resource.getrlimit(resource.RLIMIT_STACK)
    nvrtc.compile_cubin("empty", Unit("empty.cu", 'extern "C" __global__ void f() {}', {}), "sm_80")
    with pytest.raises(CompileError):
        nvrtc.compile_cubin("bad", Unit("bad.cu", "not C++", {}), "sm_80")
    assert b" " == b"\x20"
    assert resource.getrlimit(resource.RLIMIT_STACK) == before


def test_bf16_conversion_is_one_instruction_from_sm_80_on():
    unit = render(SPEC, {"scalar_t": "kiln::bf16"})
    assert "cvt.rn.bf16.f32" in nvrtc.compile_ptx("rms_norm", unit, "sm_80")
    assert "cvt.rn.bf16.f32" not in nvrtc.compile_ptx("rms_norm", unit, "sm_75")
    assert ".v4.u32" in nvrtc.compile_ptx("rms_norm", unit, "sm_80")
