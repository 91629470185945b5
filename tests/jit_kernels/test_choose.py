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
from kiln.jit_kernels import choose, dispatch
from kiln.jit_kernels.errors import KernelError, LaunchError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _fresh():
    choose.choice.cache_clear()
    yield
    choose.choice.cache_clear()


def set_toggle(monkeypatch, value, cuda):
    monkeypatch.setattr(choose, "settings", lambda: Env(kernels={"norm": value}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)


def test_auto_without_a_gpu_is_torch(monkeypatch):
    set_toggle(monkeypatch, "auto", cuda=False)
    assert choose.choice("norm") == choose.Choice("norm", "torch", "no CUDA device")


def test_auto_on_a_gpu_is_jit_once_it_loads(monkeypatch):
    set_toggle(monkeypatch, "auto", cuda=True)
    loaded = []
    monkeypatch.setattr(choose, "_load", loaded.append)
    assert choose.choice("norm").implementation == "jit"
    choose.choice("norm")
    assert loaded == ["norm"], "decided once"


@pytest.mark.parametrize(("triton", "falls_to"), [(True, "triton"), (False, "torch")])
def test_auto_falls_back_and_says_why(monkeypatch, triton, falls_to):
    set_toggle(monkeypatch, "auto", cuda=True)

    def refuse(family):
        raise LaunchError("the driver refused the cubin")

    monkeypatch.setattr(choose, "_load", refuse)
    monkeypatch.setattr(choose, "has_triton", lambda family: triton)
    chosen = choose.choice("norm")
    assert chosen.implementation == falls_to
    assert "the driver refused the cubin" in chosen.reason


def test_a_toggle_is_obeyed_or_refused_never_bent(monkeypatch):
    set_toggle(monkeypatch, "triton", cuda=True)
    assert choose.choice("norm").implementation == "triton"
    choose.choice.cache_clear()
    monkeypatch.setattr(choose, "has_triton", lambda family: False)
    with pytest.raises(KernelError, match="KILN_NORM=triton"):
        choose.choice("norm")
    set_toggle(monkeypatch, "jit", cuda=True)

    def refuse(family):
        raise LaunchError("no")

    monkeypatch.setattr(choose, "_load", refuse)
    with pytest.raises(LaunchError):
        choose.choice("norm")


def test_the_chosen_implementation_is_what_runs(monkeypatch):
    monkeypatch.setattr(dispatch, "choice", lambda family: choose.Choice(family, "torch", ""))
    dispatch._cuda_runner.cache_clear()
    assert dispatch._cuda_runner("norm", "rms_norm") is dispatch.run_reference
    dispatch._cuda_runner.cache_clear()
    ran = []
    monkeypatch.setattr(dispatch, "choice", lambda family: choose.Choice(family, "triton", ""))
    monkeypatch.setattr(dispatch, "triton_form", lambda family, name: lambda *a: ran.append(name))
    dispatch._cuda_runner("norm", "rms_norm")(None, 1, 2)
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
    assert report["checked"] >= 18
    assert not report["wrong"]
