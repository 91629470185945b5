"""A toggle that asks for an attention kernel is obeyed or refused."""

from __future__ import annotations

import pytest

from kiln.cache.env import read
from kiln.engine.attention import toggles
from kiln.engine.attention.toggles import check_attention_toggles
from kiln.engine.errors import ConfigError
from kiln.jit_kernels.families import families

NEEDS = {"scalar_t": "kiln::bf16", "head_tile": "64"}


@pytest.fixture
def check(monkeypatch):
    def check(environ, needs, block_size):
        env = read(families(), environ)
        monkeypatch.setattr(toggles, "settings", lambda: env)
        check_attention_toggles({**NEEDS, **needs}, block_size)

    return check


@pytest.mark.parametrize("family", ["ATTENTION_DECODE", "ATTENTION_PREFILL"])
@pytest.mark.parametrize("kernel", ["jit", "triton"])
def test_a_kernel_that_cannot_serve_the_model_is_refused(check, family, kernel):
    environ = {f"KILN_{family}": kernel}
    check(environ, {}, 16)
    with pytest.raises(ConfigError, match=rf"block_size=32: KILN_{family}={kernel} asks for"):
        check(environ, {}, 32)
    with pytest.raises(ConfigError, match=rf"KILN_{family}={kernel}: .* dtype and head_dim"):
        check(environ, {"scalar_t": "float"}, 16)


@pytest.mark.parametrize("environ", [{}, {"KILN_ATTENTION_DECODE": "torch"}, {"KILN_NORM": "jit"}])
def test_other_toggles_allow_every_block_size(check, environ):
    check(environ, {"scalar_t": "float"}, 32)
