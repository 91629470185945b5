"""Toggles decide which implementation runs, and the reason is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kiln.cache.env import Env
from kiln.cache.store import Store
from kiln.jit_kernels import choose, dispatch, launch, template
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.errors import (
    BundleRefused,
    KernelError,
    LateKernel,
    LaunchError,
    NoSuchKernel,
    SealedMiss,
)
from kiln.jit_kernels.families import families
from kiln.jit_kernels.ops.norm import functions
from kiln.jit_kernels.registry import all_specs, find_spec
from kiln.jit_kernels.spec import needs_of
from kiln.jit_kernels.template import read_source
from kiln.jit_kernels.toolchains import nvrtc

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _fresh():
    choose._decided.cache_clear()
    yield
    choose._decided.cache_clear()


def set_toggle(monkeypatch, value, cuda):
    monkeypatch.setattr(choose, "settings", lambda: Env(kernels={"norm": value}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)


def test_auto_without_a_gpu_is_torch(monkeypatch):
    set_toggle(monkeypatch, "auto", cuda=False)
    assert choose.choice("norm") == choose.Choice("norm", "torch", "no CUDA device")


def test_auto_on_a_gpu_is_jit_once_it_loads(monkeypatch):
    set_toggle(monkeypatch, "auto", cuda=True)
    loaded = []
    monkeypatch.setattr(choose, "_load", lambda *asked: loaded.append(asked))
    assert choose.choice("norm", needs_of(torch.bfloat16)).implementation == "jit"
    choose.choice("norm")
    assert loaded == [("norm", needs_of(torch.bfloat16))], "decided once"


@pytest.mark.parametrize(("triton", "falls_to"), [(True, "triton"), (False, "torch")])
def test_auto_falls_back_and_says_why(monkeypatch, triton, falls_to):
    set_toggle(monkeypatch, "auto", cuda=True)

    def refuse(family, needs):
        raise LaunchError("the driver refused the cubin")

    monkeypatch.setattr(choose, "_load", refuse)
    monkeypatch.setattr(choose, "has_triton", lambda family: triton)
    chosen = choose.choice("norm")
    assert chosen.implementation == falls_to
    assert "the driver refused the cubin" in chosen.reason


@pytest.mark.parametrize("error", [SealedMiss, BundleRefused, LateKernel])
def test_auto_never_falls_back_from_what_an_operator_must_see(monkeypatch, error):
    set_toggle(monkeypatch, "auto", cuda=True)

    def refuse(family, needs):
        raise error("rms_norm[bf16] for sm_90a")

    monkeypatch.setattr(choose, "_load", refuse)
    with pytest.raises(error, match="rms_norm"):
        choose.choice("norm")


def test_preparing_loads_for_each_device_and_dtype(monkeypatch):
    set_toggle(monkeypatch, "auto", cuda=True)
    loaded = []
    monkeypatch.setattr(choose, "_load", lambda *asked: loaded.append(asked))
    monkeypatch.setattr(choose, "_build_in_parallel", lambda *asked: None)
    for needs in map(needs_of, (torch.bfloat16, torch.float16)):
        assert {
            one.implementation for one in choose.prepare(all_specs().values(), needs=needs)
        } == {"jit"}
        assert [family for family, _ in loaded[: len(families())]] == families()
        assert all(asked == needs for _, asked in loaded)
        loaded.clear()


@pytest.mark.parametrize(("triton", "runs"), [(False, "torch"), (True, "triton")])
def test_a_broken_template_is_served_by_the_next_implementation(monkeypatch, triton, runs):
    """Through the public function: what is faked is the GPU, and where the operator is sent."""
    set_toggle(monkeypatch, "auto", cuda=True)
    broken = read_source("norm/rms_norm.cu").replace('extern "C"', 'undeclared(); extern "C"', 1)
    line = 1 + broken[: broken.index("undeclared")].count("\n")
    whole = template.closed_source
    monkeypatch.setattr(
        template,
        "closed_source",
        lambda path: broken if path == "norm/rms_norm.cu" else whole(path),
    )
    monkeypatch.setattr(launch, "kernel_cache", lambda: KernelCache(Store(None)))
    monkeypatch.setattr(launch, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(choose, "has_triton", lambda family: triton)
    ran = []
    monkeypatch.setattr(dispatch, "triton_form", lambda family, name: lambda a: ran.append(name))
    monkeypatch.setattr(
        functions,
        "call",
        lambda spec, **named: dispatch.run_on_cuda(spec, spec.parameters.Arguments(**named)),
    )
    dispatch._cuda_runner.cache_clear()
    x, weight = torch.randn(3, 8), torch.rand(8)
    got = functions.rms_norm(x, weight, 1e-6)
    dispatch._cuda_runner.cache_clear()
    chosen = choose.choice("norm")
    assert chosen.implementation == runs
    for told in ("rms_norm[float]", f"norm/rms_norm.cu({line})", "sm_90a", nvrtc.version()):
        assert told in chosen.reason
    if runs == "torch":
        want = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
        assert torch.allclose(got, want)
    else:
        assert ran == ["rms_norm"]


def test_a_toggle_is_obeyed_or_refused_never_bent(monkeypatch):
    set_toggle(monkeypatch, "triton", cuda=True)
    assert choose.choice("norm").implementation == "triton"
    choose._decided.cache_clear()
    monkeypatch.setattr(choose, "has_triton", lambda family: False)
    with pytest.raises(KernelError, match="KILN_NORM=triton"):
        choose.choice("norm")
    set_toggle(monkeypatch, "jit", cuda=True)

    def refuse(family, needs):
        raise LaunchError("no")

    monkeypatch.setattr(choose, "_load", refuse)
    with pytest.raises(LaunchError):
        choose.choice("norm")


def test_a_model_that_an_optional_kernel_does_not_come_for_keeps_the_rest(monkeypatch):
    loaded = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(choose, "load_kernels", lambda specs, *rest: loaded.append(specs))
    for dtype in (torch.float16, torch.bfloat16):
        choose._load("quantization", needs_of(dtype))
    assert [spec.name for spec in loaded[0]] == ["quantize", "tensor_amax"]
    assert len(loaded[1]) == 5


def test_a_kernel_that_does_not_come_is_named_optional_or_not(monkeypatch):
    monkeypatch.setattr(launch, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "_loaded", lambda index: {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    variant = {"scalar_t": "kiln::fp16", "quant_t": "int8_t"}
    with pytest.raises(NoSuchKernel, match="rms_norm_quant does not come for"):
        launch.load_kernels([find_spec("rms_norm_quant")], torch.device("cuda", 0), variant)


def test_each_of_several_needed_values_must_come(monkeypatch):
    monkeypatch.setattr(launch, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "_loaded", lambda index: {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    needs = {"scalar_t": ("kiln::bf16", "double")}
    with pytest.raises(NoSuchKernel, match=r"rms_norm does not come for scalar_t double"):
        launch.load_kernels([find_spec("rms_norm")], torch.device("cuda", 0), needs)


def test_the_chosen_implementation_is_what_runs(monkeypatch):
    monkeypatch.setattr(dispatch, "choice", lambda family: choose.Choice(family, "torch", ""))
    dispatch._cuda_runner.cache_clear()
    assert dispatch._cuda_runner("norm", "rms_norm") is dispatch.run_reference
    dispatch._cuda_runner.cache_clear()
    ran = []
    monkeypatch.setattr(dispatch, "choice", lambda family: choose.Choice(family, "triton", ""))
    monkeypatch.setattr(dispatch, "triton_form", lambda family, name: lambda a: ran.append(name))
    dispatch._cuda_runner("norm", "rms_norm")(None, (1, 2))
    assert ran == ["rms_norm"]
    dispatch._cuda_runner.cache_clear()


def test_every_triton_form_agrees_with_the_reference():
    """In a process of its own: Triton decides at import whether it interprets."""
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "tools/import_root")}
    code = (ROOT / "tests/jit_kernels/triton_forms.py").read_text()
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["checked"] >= 50
    assert not report["wrong"]


def test_every_triton_form_compiles_for_a_gpu_and_fits_in_it(tmp_path):
    """In a process of its own, which takes Triton's driver away."""
    paths = {"PYTHONPATH": str(ROOT / "tools/import_root"), "TRITON_CACHE_DIR": str(tmp_path)}
    environ = {**os.environ, **paths}
    code = (ROOT / "tests/jit_kernels/triton_targets.py").read_text()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["checked"] >= 30
    assert not report["wrong"]
