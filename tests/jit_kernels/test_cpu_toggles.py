"""On a CPU a toggle is obeyed or refused, never ignored."""

from __future__ import annotations

import pytest

from kiln.cache.env import Env
from kiln.jit_kernels import dispatch
from kiln.jit_kernels.errors import KernelError


@pytest.fixture
def runner(monkeypatch):
    """What runs the norms, under a toggle and a mode."""

    def choose(toggle, mode):
        env = Env(cpu_kernels=mode, kernels={"norm": toggle})
        monkeypatch.setattr(dispatch, "settings", lambda: env)
        dispatch._cpu_runner.cache_clear()
        return dispatch._cpu_runner("norm")

    yield choose
    dispatch._cpu_runner.cache_clear()


@pytest.mark.parametrize(
    ("toggle", "mode"), [("triton", "torch"), ("triton", "host"), ("jit", "torch")]
)
def test_what_needs_a_gpu_is_refused_by_name(runner, toggle, mode):
    with pytest.raises(KernelError, match=f"KILN_NORM={toggle} needs a GPU"):
        runner(toggle, mode)
    with pytest.raises(KernelError):
        dispatch.check_cpu_toggles()


@pytest.mark.parametrize(("toggle", "mode"), [("auto", "torch"), ("torch", "torch")])
def test_torch_is_the_reference(runner, toggle, mode):
    assert runner(toggle, mode) is dispatch.run_reference


def test_torch_is_the_reference_though_others_run_on_the_host_toolchain(runner):
    assert runner("torch", "host") is dispatch.run_reference
    for toggle in ("auto", "jit"):
        assert runner(toggle, "host") is not dispatch.run_reference
