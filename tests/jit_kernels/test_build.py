"""Builds go through the disk once, and errors help a kernel's author."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kiln.cache.disk.store import Store
from kiln.jit_kernels.compile import build as build_module
from kiln.jit_kernels.compile.build import build
from kiln.jit_kernels.compile.ingredients import key_of, stored_ingredients
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.warmup import jobs_for, warm_up
from kiln.jit_kernels.declare.errors import CompileError, KernelError
from kiln.jit_kernels.declare.spec import needs_of
from kiln.jit_kernels.registry import all_specs, find_spec
from kiln.jit_kernels.toolchains import nvrtc
from kiln.jit_kernels.toolchains.template import render

ROOT = Path(__file__).resolve().parents[2]
SPEC = find_spec("rms_norm")
VARIANT = next(iter(SPEC.variants()))


def cache_in(folder):
    return KernelCache(Store(folder))


def test_a_hit_does_not_load_nvrtc(tmp_path, monkeypatch):
    first = build(SPEC, VARIANT, "sm_90a", cache_in(tmp_path))
    assert (first.tier, first.hit) == ("built", False)

    def fail(*args):
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "_bindings", fail)
    again = build(SPEC, VARIANT, "sm_90a", cache_in(tmp_path))
    assert (again.cubin, again.key, again.tier) == (first.cubin, first.key, "disk")


def test_a_damaged_entry_is_compiled_again(tmp_path):
    cache = cache_in(tmp_path)
    built = build(SPEC, VARIANT, "sm_90a", cache)
    path = cache.store.path("sm_90a", built.key)
    path.write_bytes(path.read_bytes()[:-1])
    again = build(SPEC, VARIANT, "sm_90a", cache_in(tmp_path))
    assert (again.cubin, again.hit) == (built.cubin, False)
    assert build(SPEC, VARIANT, "sm_90a", cache_in(tmp_path)).hit


def test_an_entry_says_what_went_into_it_and_what_it_takes(tmp_path):
    cache = cache_in(tmp_path)
    built = build(SPEC, VARIANT, "sm_90a", cache)
    header = cache.store.get("sm_90a", built.key).header
    assert (header["kernel"], header["variant"]) == ("rms_norm", dict(VARIANT))
    assert key_of(stored_ingredients(header)) == built.key
    labels = [label for label, _ in header["ingredients"]]
    assert {"arch", "toolchain", "option", "entry", "program", "source"} < set(labels)
    assert "header kiln/rows/vec.cuh" in labels
    assert header["resources"]["rms_norm"]["registers"] > 8
    assert header["resources"]["rms_norm"]["shared_bytes"] > 0  # the warps' partial sums


def test_a_compile_error_speaks_in_the_authors_lines_and_is_never_published(tmp_path, monkeypatch):
    unit = render(SPEC, VARIANT)
    broken = dataclasses.replace(
        unit, text=unit.text.replace('extern "C"', 'undeclared(); extern "C"')
    )
    monkeypatch.setattr(build_module, "render", lambda spec, variant: broken)
    line = next(
        number
        for number, text in enumerate((ROOT / "kernel_sources" / SPEC.source).open(), 1)
        if text.startswith('extern "C"')
    )
    with pytest.raises(CompileError) as caught:
        build(SPEC, VARIANT, "sm_90a", cache_in(tmp_path))
    message = str(caught.value)
    assert f"kernel_sources/norm/rms_norm.cu({line})" in message
    assert "rms_norm[" in message
    assert "sm_90a" in message
    assert nvrtc.version() in message
    assert not list(tmp_path.rglob("*.kk"))


def test_an_entry_that_the_template_does_not_have_is_named(tmp_path):
    wrong = dataclasses.replace(SPEC, entry="rms_norms")
    with pytest.raises(CompileError, match=r"rms_norms.*it has rms_norm"):
        build(wrong, VARIANT, "sm_90a", cache_in(tmp_path))
    assert not list(tmp_path.rglob("*.kk"))


def test_generic_lambdas_are_the_devices_with_every_nvrtc_that_is_allowed():
    """NVRTC 13.0 rejects them as host code; later releases need no option."""
    generic = [
        spec.name
        for spec in all_specs().values()
        for unit in [render(spec, next(spec.variants()))]
        if any("](auto" in text for text in (unit.text, *unit.headers.values()))
    ]
    assert "paged_attention" in generic
    assert "--device-as-default-execution-space" in nvrtc.options("sm_90a")


def test_warm_up_counts_failures_and_goes_on(tmp_path, monkeypatch):
    bad = dataclasses.replace(SPEC, source="norm/absent.cu")
    jobs = jobs_for([bad, SPEC], ["sm_80", "sm_90a"])
    outcomes, _ = warm_up(jobs, cache_in(tmp_path), 2)
    failed = [o for o in outcomes if o.built is None]
    assert len(outcomes) == 12
    assert len(failed) == 6
    assert "norm/absent.cu" in str(failed[0].error)


def test_a_model_needs_only_the_variants_of_its_dtype():
    needs = {**needs_of(torch.bfloat16), "max_world": "4"}
    jobs = jobs_for(all_specs().values(), ["sm_90a"], needs)
    assert {job.spec.name for job in jobs} == set(all_specs())
    for name, value in needs.items():
        assert {job.variant.get(name, value) for job in jobs} == {value}


def test_a_target_below_the_kernels_minimum_is_left_out():
    newer = dataclasses.replace(SPEC, min_arch=90)
    assert {job.arch for job in jobs_for([newer], ["sm_80", "sm_90a"])} == {"sm_90a"}
    with pytest.raises(KernelError, match="sm_xyz"):
        jobs_for([SPEC], ["sm_xyz"])


@pytest.mark.deep  # tests/engine/cli does it for one kernel
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
        "sm_75",
        "--json",
    ]
    count = len(jobs_for(all_specs().values(), ["sm_75"]))
    reports = [
        json.loads(subprocess.check_output(command, env=environ, timeout=120)) for _ in range(2)
    ]
    cold, warm = reports
    assert set(cold) == {"kernels", "built", "hit", "failed", "seconds"}
    assert (cold["kernels"], cold["built"], cold["hit"], cold["failed"]) == (count, count, 0, 0)
    assert (warm["kernels"], warm["built"], warm["hit"], warm["failed"]) == (count, 0, count, 0)
