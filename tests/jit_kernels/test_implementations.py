"""One place decides what runs, by device, operator and variant; toggles are obeyed or refused."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from depth import at_depth

from kiln.cache.disk.store import Store
from kiln.cache.env import Env
from kiln.jit_kernels import implementations, launch, registry
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.ready import ReadyGuard
from kiln.jit_kernels.declare import catalog
from kiln.jit_kernels.declare.errors import (
    BundleRefused,
    CompileError,
    KernelError,
    LateKernel,
    LaunchError,
    NoSuchKernel,
    SealedMiss,
)
from kiln.jit_kernels.declare.families import families
from kiln.jit_kernels.declare.spec import needs_of
from kiln.jit_kernels.implementations import decide, decision, run
from kiln.jit_kernels.launch import Loaded
from kiln.jit_kernels.ops.norm import functions
from kiln.jit_kernels.registry import all_specs, find_spec
from kiln.jit_kernels.toolchains import nvrtc, template
from kiln.jit_kernels.toolchains.template import read_source

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU, OTHER_GPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
NORM = find_spec("rms_norm")
BF16, FP16, FP32 = map(needs_of, (torch.bfloat16, torch.float16, torch.float32))
# As attention: a kernel has some head sizes, and not each of them in each dtype.
ATTEND = replace(
    NORM,
    name="attend",
    params={"scalar_t": ["kiln::fp16", "kiln::bf16"], "head_tile": ["64", "128"]},
    is_supported=lambda variant: dict(variant) != {"scalar_t": "kiln::fp16", "head_tile": "128"},
)


@pytest.fixture
def env(monkeypatch):
    """Set toggles and modes; nothing has been decided."""
    monkeypatch.setattr(implementations, "_decided", {})

    def set_env(toggle="auto", cpu_kernels="torch"):
        env = Env(kernels={"norm": toggle}, cpu_kernels=cpu_kernels)
        monkeypatch.setattr(implementations, "settings", lambda: env)
        implementations._decided.clear()

    set_env()
    return set_env


@pytest.fixture
def ran(env, monkeypatch):
    """A machine with GPUs whose loads succeed: what was loaded, and then what ran."""
    events = []

    def load(spec, variant, device):
        launch.check_needs(spec, variant)
        label = "-".join((spec.name, *variant.values(), str(device.index)))
        events.append(f"load {label}")
        return Loaded(None, lambda a, bound: events.append(f"run {label}"))

    monkeypatch.setattr(implementations, "load", load)
    monkeypatch.setattr(implementations, "_build_in_parallel", lambda *asked: None)
    no_triton(monkeypatch)
    return events


def no_triton(monkeypatch):
    def refuse(family, name, variant):
        raise NoSuchKernel(f"{name} has no Triton form")

    monkeypatch.setattr(implementations, "triton_form", refuse)


def has_triton(monkeypatch):
    ran = []
    monkeypatch.setattr(
        implementations, "triton_form", lambda family, name, variant: lambda a: ran.append(name)
    )
    return ran


def cannot_load(monkeypatch, error):
    def refuse(*asked):
        raise error

    monkeypatch.setattr(implementations, "load", refuse)


def test_auto_on_a_cpu_is_torch(env):
    made = decision(NORM, BF16, CPU)
    assert (made.implementation, made.reason) == ("torch", "KILN_CPU_KERNELS=torch")


def test_auto_on_a_gpu_is_jit_and_loads_once_for_each_device_and_variant(ran):
    for device, needs in itertools.product((GPU, OTHER_GPU, GPU), (BF16, FP32, BF16)):
        assert decision(NORM, needs, device).implementation == "jit"
    assert sorted(ran) == sorted(
        f"load rms_norm-{scalar}-{index}" for scalar in ("kiln::bf16", "float") for index in (0, 1)
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_models_in_a_process_each_get_their_own(ran, order):
    """Other dtypes and head sizes, whichever comes first: one has a kernel, the other has none."""
    models = [{**BF16, "head_tile": "128"}, {**FP16, "head_tile": "128"}]
    made = {index: decide([ATTEND, NORM], GPU, models[index]).made for index in order}
    told = [[(one.spec.name, one.implementation) for one in made[index]] for index in (0, 1)]
    assert sorted(told[0]) == [("attend", "jit"), ("rms_norm", "jit")]
    assert sorted(told[1]) == [("attend", "torch"), ("rms_norm", "jit")]
    assert {one.variant["scalar_t"] for one in made[0]} == {"kiln::bf16"}
    assert {one.variant["scalar_t"] for one in made[1]} == {"kiln::fp16"}
    assert decide([ATTEND, NORM], GPU, models[0]).made == made[0], "nobody changed it"
    assert "attend has no variant for scalar_t kiln::fp16, head_tile 128" in made[1][0].reason
    assert len(ran) == 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_of_two_models_run_what_each_of_them_got(env, monkeypatch, order):
    triton, loaded = has_triton(monkeypatch), []

    def load(spec, variant, device):
        if variant == FP16:
            raise CompileError("fp16 is broken")
        return Loaded(None, lambda a, bound: loaded.append(dict(bound.variant)))

    monkeypatch.setattr(implementations, "load", load)
    monkeypatch.setattr(implementations, "_build_in_parallel", lambda *asked: None)
    models = (BF16, FP16)
    for index in order:
        decide([NORM], GPU, models[index])
    for needs in models:  # what is faked is the device of the call
        made, a = decision(NORM, needs, GPU), NORM.make_arguments(needs, NORM.sizes[2], "cpu")
        monkeypatch.setitem(implementations._decided, (CPU, "rms_norm", *needs.values()), made)
        run(NORM, a)
    assert (loaded, triton) == ([dict(BF16)], ["rms_norm"])


def test_reasons_are_told_by_variant(env, monkeypatch):
    def load(spec, variant, device):
        if variant == FP16:
            raise CompileError("fp16 is broken")
        return Loaded(None, None)

    monkeypatch.setattr(implementations, "load", load)
    monkeypatch.setattr(implementations, "_build_in_parallel", lambda *asked: None)
    no_triton(monkeypatch)
    decisions = decide([NORM], GPU)
    why = "Kiln's kernels are unavailable: fp16 is broken; Triton's kernels are unavailable: "
    assert decisions.summary()["norm"] == (
        "jit: compiled by NVRTC and loaded; "
        f"rms_norm[fp16] by torch: {why}rms_norm has no Triton form"
    )
    assert decisions.run_kernels("norm")
    assert not decide([NORM], GPU, FP16).run_kernels("norm")
    assert decide([NORM], CPU).summary() == {"norm": "torch: KILN_CPU_KERNELS=torch"}


@pytest.mark.parametrize(("triton", "falls_to"), [(True, "triton"), (False, "torch")])
def test_auto_falls_back_and_says_why(env, monkeypatch, triton, falls_to):
    cannot_load(monkeypatch, LaunchError("the driver refused the cubin"))
    (has_triton if triton else no_triton)(monkeypatch)
    made = decision(NORM, BF16, GPU)
    assert made.implementation == falls_to
    assert "the driver refused the cubin" in made.reason
    assert ("has no Triton form" in made.reason) is not triton


@pytest.mark.parametrize("error", [SealedMiss, BundleRefused, LateKernel])
@pytest.mark.parametrize("toggle", ["auto", "jit"])
def test_what_an_operator_must_see_is_never_passed_over(env, monkeypatch, error, toggle):
    env(toggle)
    cannot_load(monkeypatch, error("rms_norm[bf16] for sm_90a"))
    for _ in range(2):
        with pytest.raises(error, match="rms_norm"):
            decision(NORM, BF16, GPU)


@pytest.mark.parametrize(("triton", "runs"), [(False, "torch"), (True, "triton")])
def test_a_broken_template_is_served_by_the_next_implementation(env, monkeypatch, triton, runs):
    """Through the public function: what is faked is the GPU, and where the operator is sent."""
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
    monkeypatch.setattr(launch, "_loaded", lambda index: {})
    by_triton = has_triton(monkeypatch)
    if not triton:
        no_triton(monkeypatch)
    made = decision(NORM, FP32, GPU)
    monkeypatch.setitem(implementations._decided, (CPU, "rms_norm", "float"), made)
    x, weight = torch.randn(3, 8), torch.rand(8)
    got = functions.rms_norm(x, weight, 1e-6)
    assert made.implementation == runs
    for told in ("rms_norm[float]", f"norm/rms_norm.cu({line})", "sm_90a", nvrtc.version()):
        assert told in made.reason
    if runs == "torch":
        want = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
        assert torch.allclose(got, want)
    else:
        assert by_triton == ["rms_norm"]


def test_a_toggle_on_a_gpu_is_obeyed_or_refused_never_bent(env, monkeypatch):
    env("triton")
    cannot_load(monkeypatch, LaunchError("no"))
    has_triton(monkeypatch)
    made = decision(NORM, BF16, GPU)
    assert (made.implementation, made.reason) == ("triton", "KILN_NORM=triton")
    no_triton(monkeypatch)
    env("triton")
    with pytest.raises(KernelError, match=r"KILN_NORM=triton cannot .* unset KILN_NORM"):
        decision(NORM, BF16, GPU)
    env("jit")
    with pytest.raises(LaunchError):
        decision(NORM, BF16, GPU)
    env("torch")
    assert decision(NORM, BF16, GPU).implementation == "torch"


@pytest.mark.skipif(not registry.has_triton("norm"), reason="Triton is not installed")
def test_a_variant_that_triton_lacks_is_refused_by_its_toggle_and_passed_over_without(
    env, monkeypatch
):
    module = importlib.import_module("kiln.jit_kernels.ops.norm.triton")
    has = {"rms_norm": {"scalar_t": ("kiln::bf16", "float")}}
    monkeypatch.setattr(module, "VARIANTS", has, raising=False)
    cannot_load(monkeypatch, LaunchError("no"))
    env("triton")
    assert decision(NORM, BF16, GPU).implementation == "triton"
    why = r"Triton form of rms_norm has no variant for scalar_t kiln::fp16 \(it has scalar_t kiln:"
    with pytest.raises(NoSuchKernel, match=rf"KILN_NORM=triton cannot .*{why}.* unset KILN_NORM"):
        decision(NORM, FP16, GPU)
    assert decision(find_spec("fused_add_rms_norm"), FP16, GPU).implementation == "triton"
    env()
    made = [decision(NORM, variant, GPU) for variant in (BF16, FP16)]
    assert [one.implementation for one in made] == ["triton", "torch"]
    assert "has no variant for scalar_t kiln::fp16" in made[1].reason
    assert [registry.is_in_triton(NORM, variant) for variant in (BF16, FP16, {})] == [1, 0, 1]


@pytest.mark.parametrize("family", families())
def test_variants_that_triton_has_are_those_of_a_kernel(family):
    if registry.has_triton(family):
        module = importlib.import_module(f"kiln.jit_kernels.ops.{family}.triton")
        for name, has in getattr(module, "VARIANTS", {}).items():
            assert all(set(own) <= {*find_spec(name).params[one]} for one, own in has.items())


@pytest.mark.parametrize("mode", ["torch", "host"])
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_a_toggle_for_a_variant_that_no_kernel_has_is_refused_before_any_load(
    ran, env, mode, device
):
    env("jit", mode)
    with pytest.raises(NoSuchKernel, match="KILN_NORM=jit cannot be used here"):
        decide([NORM, ATTEND], device, {**FP16, "head_tile": "128"})
    assert not ran
    double = {"scalar_t": "double"}
    with pytest.raises(NoSuchKernel, match="KILN_NORM=jit cannot be used here"):
        decision(NORM, double, device)
    if device == GPU or mode == "host":
        with pytest.raises(
            NoSuchKernel, match=r"no variant for scalar_t double \(it has scalar_t float"
        ):
            decision(NORM, double, device)
    env("auto", mode)
    assert decision(NORM, double, device).implementation == "torch"
    if device == GPU or mode == "host":
        assert "no variant for scalar_t double" in decision(NORM, double, device).reason


@pytest.mark.parametrize(
    ("toggle", "mode"), [("triton", "torch"), ("triton", "host"), ("jit", "torch")]
)
def test_what_needs_a_gpu_is_refused_by_name_on_a_cpu(env, toggle, mode):
    env(toggle, mode)
    with pytest.raises(KernelError, match=rf"KILN_NORM={toggle} cannot .*CPU.*; unset KILN_NORM"):
        decide(all_specs().values(), CPU)


@pytest.mark.parametrize("mode", ["torch", "host", "host-check"])
@pytest.mark.parametrize("toggle", ["auto", "jit", "torch"])
def test_on_a_cpu_the_mode_says_whether_kernels_run(env, toggle, mode):
    if (toggle, mode) == ("jit", "torch"):
        return  # refused, as above
    env(toggle, mode)
    made = decision(NORM, BF16, CPU)
    assert made.implementation == ("torch" if toggle == "torch" else mode)


@pytest.mark.parametrize("mode", ["host", "host-check"])
def test_on_a_cpu_the_kernels_own_source_runs(env, monkeypatch, mode):
    env("auto", mode)
    seen = []
    own = implementations.host.run

    def host_run(spec, a, *, checked, env):
        seen.append(checked)
        own(spec, a, checked=checked, env=env)

    monkeypatch.setattr(implementations.host, "run", host_run)
    a = NORM.make_arguments(FP32, {"rows": 2, "d": 64}, "cpu")
    a.out.fill_(float("nan"))
    run(NORM, a)
    assert seen == [mode == "host-check"]
    torch.testing.assert_close(a.out, NORM.reference(a)["out"])


def test_a_kernel_that_other_operators_can_do_without_leaves_the_toggle_to_the_rest(ran, env):
    fused = replace(ATTEND, name="fused", has_unfused_path=True)
    env("jit")
    made = decide([NORM, fused], GPU, {**FP16, "head_tile": "128"}).made
    assert [(one.spec.name, one.implementation) for one in made] == [("rms_norm", "jit")]
    with pytest.raises(NoSuchKernel, match="fused has no variant"):
        decision(fused, {**FP16, "head_tile": "128"}, GPU)
    assert ran == ["load rms_norm-kiln::fp16-0"]


def test_each_of_several_needed_values_must_be_there(monkeypatch):
    monkeypatch.setattr(launch, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "_loaded", lambda index: {})
    needs = {"scalar_t": ("double", "kiln::bf16")}
    with pytest.raises(NoSuchKernel, match=r"rms_norm has no variant for scalar_t double"):
        launch.load_kernels([NORM], GPU, needs)
    assert ATTEND.lacking({"scalar_t": ("kiln::fp16", "kiln::bf16"), "head_tile": "128"}) == [
        {"scalar_t": "kiln::fp16", "head_tile": "128"}
    ]
    assert ATTEND.lacking({"head_tile": "128"}) == ATTEND.lacking({"soft_cap": "true"}) == []


def test_a_kernel_that_replaces_an_operators_runs_on_its_target_alone(env, monkeypatch):
    other = replace(NORM, name="rms_norm_wgmma", replaces="rms_norm", only_arch="sm_90a")
    monkeypatch.setattr(catalog, "_SPECS", {"rms_norm": NORM, "rms_norm_wgmma": other})
    built = []

    def build(spec, *asked):
        built.append(spec.name)
        raise CompileError("not here")

    monkeypatch.setattr(launch, "build", build)
    monkeypatch.setattr(launch, "kernel_cache", lambda: KernelCache(Store(None)))
    monkeypatch.setattr(launch, "_loaded", lambda index: {})
    for arch in ("sm_90a", "sm_100a"):
        monkeypatch.setattr(launch, "device_arch", lambda device, arch=arch: arch)
        env()
        decision(NORM, BF16, GPU)
    assert built == ["rms_norm_wgmma", "rms_norm"]


def test_a_call_that_nobody_decided_before_is_decided_then_and_once(env, monkeypatch):
    asked, whole = [], implementations._decide
    monkeypatch.setattr(implementations, "_decide", lambda *x: asked.append(x) or whole(*x))
    for needs in (BF16, FP16, BF16, FP16):
        run(NORM, NORM.make_arguments(needs, NORM.sizes[2], "cpu"))
    assert [variant for _, variant, _ in asked] == [BF16, FP16]


def test_after_ready_only_one_more_engine_may_load(ran, monkeypatch):
    guard, load = ReadyGuard("error"), implementations.load
    guard.declare_ready()
    monkeypatch.setattr(implementations, "ready_guard", lambda: guard)
    monkeypatch.setattr(
        implementations, "load", lambda *x: guard.passes(x[0].name, "loaded") or load(*x)
    )
    with pytest.raises(LateKernel, match="rms_norm is loaded after the engine was ready"):
        decision(NORM, BF16, GPU)
    decide([NORM], GPU, BF16)
    assert decision(NORM, BF16, GPU).implementation == "jit"


@pytest.mark.parametrize(("toggle", "builds"), [("auto", True), ("jit", True), ("torch", False)])
def test_what_may_run_is_built_at_once_and_its_progress_told(env, monkeypatch, toggle, builds):
    env(toggle)
    told, built = [], []

    def warm_up(jobs, cache, num_threads, on_outcome):
        for job in jobs:
            built.append(job.name)
            on_outcome(None)

    monkeypatch.setattr(implementations, "warm_up", warm_up)
    monkeypatch.setattr(implementations, "kernel_cache", lambda: KernelCache(Store(None)))
    monkeypatch.setattr(implementations, "target_arch", lambda device: "sm_90a")
    monkeypatch.setattr(implementations, "load", lambda *asked: Loaded(None, None))
    norms = [NORM, find_spec("fused_add_rms_norm")]
    decide(norms, GPU, BF16, lambda *stage: told.append(stage))
    assert built == ["rms_norm[bf16] sm_90a", "fused_add_rms_norm[bf16] sm_90a"][: 2 * builds]
    assert told == [("kernels", 1, 2), ("kernels", 2, 2)][: 2 * builds]


def test_every_triton_form_agrees_with_the_reference():
    """In a process of its own: Triton decides at import whether it interprets."""
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "tools/import_root")}
    code = (ROOT / "tests/jit_kernels/triton_forms.py").read_text()
    done = subprocess.run(
        [sys.executable, "-c", code, at_depth("quick", "deep")],
        env=environ, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["checked"] >= at_depth(8, 50)
    assert not report["wrong"]


def test_every_triton_form_compiles_for_a_gpu_and_fits_in_it(tmp_path):
    """In a process of its own, which takes Triton's driver away."""
    paths = {"PYTHONPATH": str(ROOT / "tools/import_root"), "TRITON_CACHE_DIR": str(tmp_path)}
    environ = {**os.environ, **paths}
    code = (ROOT / "tests/jit_kernels/triton_targets.py").read_text()
    done = subprocess.run(
        [sys.executable, "-c", code, at_depth("quick", "deep")],
        env=environ, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["checked"] >= at_depth(8, 30)
    assert not report["wrong"]
