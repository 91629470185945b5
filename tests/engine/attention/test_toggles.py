"""When attention kernels serve a model; a toggle that asks for one is obeyed or refused."""

from __future__ import annotations

import pytest
import torch

from kiln.cache.env import read
from kiln.engine.attention import toggles
from kiln.engine.attention.toggles import ATTENTION_FAMILIES, kernels_can_attend
from kiln.engine.errors import ConfigError
from kiln.jit_kernels import implementations
from kiln.jit_kernels.declare.families import families
from kiln.jit_kernels.registry import operators

NEEDS = {"scalar_t": "kiln::bf16", "head_tile": "64"}


@pytest.fixture
def check(monkeypatch):
    def check(environ, needs, block_size):
        env = read(families(), environ)
        for module in (toggles, implementations):
            monkeypatch.setattr(module, "settings", lambda: env)
        monkeypatch.setattr(implementations, "_decided", {})
        return kernels_can_attend({**NEEDS, **needs}, block_size)

    return check


@pytest.mark.parametrize("family", ["ATTENTION_DECODE", "ATTENTION_PREFILL"])
@pytest.mark.parametrize("kernel", ["jit", "triton"])
def test_a_kernel_that_cannot_serve_the_model_is_refused(check, family, kernel):
    environ = {f"KILN_{family}": kernel}
    assert check(environ, {}, 16)
    with pytest.raises(ConfigError, match=rf"block_size=32: KILN_{family}={kernel} asks for"):
        check(environ, {}, 32)
    says = rf"KILN_{family}={kernel}: .* head_dim and soft cap \(scalar_t float, head_tile 64\)"
    with pytest.raises(ConfigError, match=says):
        check(environ, {"scalar_t": "float"}, 16)


@pytest.mark.parametrize("environ", [{}, {"KILN_ATTENTION_DECODE": "torch"}, {"KILN_NORM": "jit"}])
def test_other_toggles_leave_it_to_torch(check, environ):
    assert check(environ, {}, 16)
    assert not check(environ, {}, 32)
    assert not check(environ, {"scalar_t": "float"}, 16)
    assert not check(environ, {"head_tile": "24"}, 16)


@pytest.mark.parametrize(
    ("needs", "wanted"),
    [
        ({"soft_cap": ["true"], "head_tile": "128"}, True),
        ({"soft_cap": ["false", "true"], "head_tile": "256"}, True),
        ({"soft_cap": ["true"], "head_tile": "128", "kv_t": "kiln::e4m3"}, True),
        ({"soft_cap": ["false"]}, True),
        ({"soft_cap": ["false", "true"]}, False),  # with heads of 64
        ({"soft_cap": ["true"], "head_tile": "128", "scalar_t": "kiln::fp16"}, False),
    ],
)
def test_a_soft_cap_needs_kernels_that_have_one(check, needs, wanted):
    assert check({}, needs, 16) is wanted


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"KILN_CPU_KERNELS": "host"}, True),
        ({"KILN_CPU_KERNELS": "host-check", "KILN_ATTENTION_PREFILL": "torch"}, True),
        (
            {
                "KILN_CPU_KERNELS": "host",
                "KILN_ATTENTION_PREFILL": "torch",
                "KILN_ATTENTION_DECODE": "torch",
            },
            False,
        ),
    ],
    ids=["torch", "host", "one-family", "neither"],
)
def test_on_a_cpu_they_attend_where_either_family_runs_kernels(check, environ, wanted):
    assert check(environ, {}, 16)
    decisions = implementations.decide(operators(), torch.device("cpu"), NEEDS)
    assert decisions.run_kernels(*ATTENTION_FAMILIES) is wanted
