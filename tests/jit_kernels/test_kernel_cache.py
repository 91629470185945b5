"""The tiers of the kernel cache: lookups in each mode, and keys."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections import Counter

import pytest

from kiln.cache.disk.bundle import Bundle, write_bundle
from kiln.cache.disk.entry import Entry
from kiln.cache.disk.lock import builder_lock
from kiln.cache.disk.store import Store
from kiln.cache.env import Env
from kiln.jit_kernels.compile import build as build_module
from kiln.jit_kernels.compile import kernel_cache as cache_module
from kiln.jit_kernels.compile.build import build, build_unless_busy, look_up
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.open_cache import open_cache
from kiln.jit_kernels.compile.warmup import jobs_for, warm_up
from kiln.jit_kernels.declare.errors import BundleRefused, SealedMiss, ToolchainMissing
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import nvrtc

SPEC = find_spec("rms_norm")
VARIANT = next(iter(SPEC.variants()))
ARCH = "sm_90a"


@pytest.fixture
def compiles(monkeypatch):
    """Count compilations through a fake compiler."""
    done = []

    def compile_cubin(name, unit, arch):
        done.append(f"{name} {arch}")
        return b"cubin"

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    monkeypatch.setattr(build_module, "header_of", lambda *args: {"ingredients": []})
    return done


@pytest.fixture
def no_nvrtc(monkeypatch):
    def missing():
        raise ToolchainMissing("NVRTC is not installed")

    for name in ("identity", "_bindings", "_library"):
        monkeypatch.setattr(nvrtc, name, missing)
    cache_module._installed.cache_clear()
    yield
    cache_module._installed.cache_clear()


@pytest.fixture
def other_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "identity", lambda: "nvrtc/another")
    cache_module._installed.cache_clear()
    yield
    cache_module._installed.cache_clear()


def tier(cache, arch=ARCH):
    return build(SPEC, VARIANT, arch, cache).tier


def bundle_of(warm):
    return Bundle.open(warm.bundle, warm.sha256)


def test_what_a_process_has_it_does_not_look_for(tmp_path, compiles):
    cache = KernelCache(Store(tmp_path))
    assert [tier(cache), tier(cache)] == ["built", "process"]


@pytest.mark.parametrize(
    ("mode", "bundle", "first", "wrote"),
    [
        ("rw", False, "disk", False),
        ("rw", True, "bundle", False),
        ("ro", False, "disk", False),
        ("ro", True, "bundle", False),
        ("sealed", False, "disk", False),
        ("sealed", True, "bundle", False),
        ("off", True, "built", False),
        ("refresh", True, "built", True),
    ],
)
def test_where_each_mode_finds_what_is_there(warm, compiles, tmp_path, mode, bundle, first, wrote):
    writes = []
    store = Store(warm.root, mode=mode)
    store.put = lambda arch, key, payload, header: writes.append(key) or True
    cache = KernelCache(store, bundle=bundle_of(warm) if bundle else None, locks=tmp_path)
    assert tier(cache) == first
    assert tier(cache) == "process"
    assert len(compiles) == (first == "built")
    assert bool(writes) == (first == "built"), "the store itself decides by its mode"


@pytest.mark.parametrize(("mode", "kept"), [("rw", 1), ("ro", 0), ("off", 0), ("refresh", 1)])
def test_what_each_mode_keeps_of_a_miss(tmp_path, compiles, mode, kept):
    root = tmp_path / "kernels"
    assert tier(KernelCache(Store(root, mode=mode))) == "built"
    assert len(list(root.rglob("*.kk"))) == kept


def test_refresh_replaces_what_is_there(tmp_path, compiles, monkeypatch):
    tier(KernelCache(Store(tmp_path)))
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *args: b"newer")
    tier(KernelCache(Store(tmp_path, mode="refresh")))
    assert build(SPEC, VARIANT, ARCH, KernelCache(Store(tmp_path))).cubin == b"newer"


def test_a_sealed_miss_names_the_ingredient_that_differs(warm, compiles, other_nvrtc, monkeypatch):
    sealed = KernelCache(Store(None, mode="sealed"), bundle=bundle_of(warm))
    with pytest.raises(SealedMiss) as caught:
        build(SPEC, VARIANT, "sm_75", sealed)
    message = str(caught.value)
    assert "rms_norm[float] for sm_75" in message
    assert str(warm.bundle) in message
    assert "arch (the target): sm_75 here, sm_80 there" in message

    options = nvrtc.options(ARCH)
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "options", lambda arch: [*options, "-lineinfo"])
        with pytest.raises(SealedMiss, match=r"option .*: -lineinfo here, nothing there$"):
            build(SPEC, VARIANT, ARCH, sealed)
    unit = build_module.render(SPEC, VARIANT)
    headers = {**unit.headers, "kiln/rows/vec.cuh": "other"}
    changed = dataclasses.replace(unit, headers=headers)
    monkeypatch.setattr(build_module, "render", lambda spec, variant: changed)
    with pytest.raises(SealedMiss, match=r"header kiln/rows/vec\.cuh: \S+ here, \S+ there$"):
        build(SPEC, VARIANT, ARCH, sealed)
    with pytest.raises(SealedMiss, match="the cache is empty"):
        build(SPEC, VARIANT, ARCH, KernelCache(Store(None, mode="sealed")))
    assert not compiles


def test_a_bundle_is_believed_whatever_nvrtc_is_installed(warm, compiles, other_nvrtc):
    for mode in ("rw", "sealed"):
        cache = KernelCache(Store(None, mode=mode), bundle=bundle_of(warm))
        assert tier(cache) == "bundle"
    assert tier(KernelCache(Store(warm.root, mode="ro"))) == "built", "a cache goes by what is here"
    assert tier(KernelCache(Store(warm.root, mode="sealed"))) == "disk", "nothing will be built"


def test_a_machine_without_nvrtc_uses_what_others_built(warm, no_nvrtc):
    for mode in ("rw", "ro", "sealed"):
        assert tier(KernelCache(Store(None, mode=mode), bundle=bundle_of(warm))) == "bundle"
        assert tier(KernelCache(Store(warm.root, mode=mode))) == "disk"
    with pytest.raises(ToolchainMissing):
        build(SPEC, VARIANT, "sm_75", KernelCache(Store(warm.root, mode="ro")))


def test_what_another_nvrtc_compiled_is_used_and_not_published(tmp_path, compiles, monkeypatch):
    """Two are installed: the key would name the one on the path, but the other is loaded."""
    monkeypatch.setattr(nvrtc, "loaded_identity", lambda: "nvrtc/the other")
    cache = KernelCache(Store(tmp_path))
    assert [tier(cache), tier(cache)] == ["built", "process"]
    assert not list(tmp_path.rglob("*.kk"))
    assert not cache.may_ship(build(SPEC, VARIANT, ARCH, cache).key)


def test_the_nvrtc_that_is_loaded_is_the_one_in_the_key():
    nvrtc.version()
    assert nvrtc.loaded_identity() == nvrtc.identity()


def test_what_somebody_else_builds_is_left_for_later(tmp_path, compiles):
    locks = tmp_path / "locks"
    locks.mkdir(mode=0o700)
    root = tmp_path / "kernels"
    key = build(SPEC, VARIANT, ARCH, KernelCache(Store(None))).key
    jobs = jobs_for([SPEC], [ARCH])
    finished, order = threading.Event(), []

    def other_process():
        finished.wait(5)
        Store(root).put(ARCH, key, b"theirs", {})
        lock.close()

    lock = contextlib.ExitStack()
    assert lock.enter_context(builder_lock(locks, key))
    assert build_unless_busy(SPEC, VARIANT, ARCH, KernelCache(Store(root), locks=locks)) is None
    thread = threading.Thread(target=other_process)
    thread.start()

    def on_outcome(outcome):
        order.append((outcome.job.variant["scalar_t"], outcome.built.tier))
        if len(order) == len(jobs) - 1:
            finished.set()

    outcomes, _ = warm_up(jobs, KernelCache(Store(root), locks=locks), 1, on_outcome)
    thread.join()
    assert outcomes[0].built.cubin == b"theirs"
    first = VARIANT["scalar_t"]
    assert order[-1] == (first, "disk"), "the others were built meanwhile"
    assert [tier for _, tier in order[:-1]] == ["built", "built"]


def test_a_warm_look_up_reads_and_hashes_one_file_and_does_little_else(warm):
    """Count every call from key to verified bytes, and from template to key to bytes."""
    job = warm.jobs[0]
    key = build(job.spec, job.variant, job.arch, warm.cache()).key
    for run, hashed, most in (
        (lambda cache: cache.find(job.arch, key), 1, 80),
        (lambda cache: look_up(job.spec, job.variant, job.arch, cache)[0], 2, 500),
    ):
        cache, calls = warm.cache(), Counter()

        def count(frame, event, function, calls=calls):
            calls[function.__name__ if event == "c_call" else event] += 1

        sys.setprofile(count)
        try:
            found = run(cache)
        finally:
            sys.setprofile(None)
        assert found is not None
        assert (calls["open"], calls["read"]) == (1, 1)
        assert calls["openssl_sha256"] + calls["sha256"] == hashed
        assert calls["fstat"] + calls["lstat"] <= 5
        assert calls.total() - calls["return"] - calls["c_return"] <= most


def test_without_locks_everybody_builds(tmp_path, compiles):
    for locks in (None, tmp_path / "file"):
        compiles.clear()
        (tmp_path / "file").touch()
        cache = KernelCache(Store(tmp_path / f"kernels{locks is None}"), locks=locks)
        outcomes, _ = warm_up(jobs_for([SPEC], [ARCH]), cache, 1)
        assert [one.built.tier for one in outcomes] == ["built"] * 3
        assert len(compiles) == 3


def test_the_environment_opens_what_it_names(warm, tmp_path):
    env = Env(kernel_cache_dir=tmp_path, kernel_bundle=warm.bundle, kernel_cache="sealed")
    assert tier(open_cache(env)) == "bundle"
    pinned = dataclasses.replace(env, kernel_bundle_sha256=warm.sha256)
    assert tier(open_cache(pinned)) == "bundle"
    for wrong, says in (
        ({"kernel_bundle_sha256": "0" * 64}, "has SHA-256"),
        ({"kernel_bundle": tmp_path / "absent"}, "absent"),
        ({"kernel_bundle": None, "kernel_bundle_sha256": "0" * 64}, "KILN_KERNEL_BUNDLE is not"),
    ):
        with pytest.raises(BundleRefused, match=says):
            open_cache(dataclasses.replace(env, **wrong))


def test_any_changed_byte_of_a_bundle_refuses_it(warm, tmp_path):
    data = warm.bundle.read_bytes()
    path = tmp_path / "tampered.kpack"
    for place in range(0, len(data), len(data) // 97):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(BundleRefused):
            open_cache(Env(kernel_bundle=path))
    path.write_bytes(data[:-1])
    with pytest.raises(BundleRefused):
        open_cache(Env(kernel_bundle=path))


def test_a_bundle_of_some_other_program_is_a_miss_with_a_reason(tmp_path):
    path = tmp_path / "foreign.kpack"
    write_bundle(path, [(ARCH, "0" * 64, Entry.of({"made": "elsewhere"}, b"payload"))])
    sealed = KernelCache(Store(None, mode="sealed"), bundle=Bundle.open(path))
    with pytest.raises(SealedMiss, match="the cache is empty"):
        build(SPEC, VARIANT, ARCH, sealed)
