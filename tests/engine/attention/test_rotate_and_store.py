"""One launch and an operation for each part leave the same queries and the same pool."""

from __future__ import annotations

import pytest
import torch

from kiln.cache.env import Env
from kiln.engine.attention import rotate_and_store as module
from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.attention.rotate_and_store import OneLaunch, SeparateOperations, choose_store
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.shape import AttentionShape
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.rotary import Rotary
from kiln.jit_kernels import implementations
from kiln.jit_kernels.declare.families import families
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.ops.rotary.table import rotary_table
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.toolchains import host

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 7, 4, 2, 32


def run(dtype, norms, path, rotary_dim=HEAD_DIM):
    """The query, and layer 1 of the pool, after a step of 7 tokens."""
    torch.manual_seed(7)
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, (None, None))
    pool = KVPool(KVShape(shape, dtype), 3, 16, torch.device("cpu"))
    qkv = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    slots = torch.randperm(48)[:TOKENS]
    norm = [
        RMSNorm(torch.rand(HEAD_DIM).to(dtype), 1e-3, **norms) for _ in "qk" if norms is not None
    ]
    rotary = Rotary(rotary_table(rotary_dim, 64, 10000.0)) if rotary_dim else None
    layer = AttentionLayer(1, shape, rotary, *norm)
    store = choose_store(layer, pool, dtype)
    assert isinstance(store, path)
    heads = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    got = store(torch.randint(64, (TOKENS,)), slots, *heads)
    assert not any(part.any() for part in pool.layer(0))
    return got, *pool.layer(1)


@pytest.fixture
def launches(monkeypatch):
    """Take the one launch, and count how often."""
    seen = []

    def launch(*arguments):
        seen.append("rope_store")
        spec = all_specs()["rope_store"]
        host.run(spec, spec.arguments(arguments), env=settings())

    monkeypatch.setattr(module, "is_one_launch", lambda *_: True)
    with torch.library._scoped_library("kiln", "IMPL") as library:
        library.impl("rope_store", launch, "CPU", allow_override=True)
        yield seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norms", "rotary_dim"),
    [
        (None, 32), ({}, 32), ({"weight_offset": 1.0}, 32), ({"round_once": True}, 16),
        ({}, 0), (None, 0),
    ],
)  # fmt: skip
def test_one_launch_does_what_the_parts_do(request, dtype, norms, rotary_dim):
    parts = run(dtype, norms, SeparateOperations, rotary_dim)
    seen = request.getfixturevalue("launches")
    once = run(dtype, norms, OneLaunch, rotary_dim)
    assert seen == ["rope_store"]
    bound = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]  # torch rounds elsewhere
    for a, b in zip(parts, once, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


def test_a_pool_that_one_launch_cannot_write_is_refused_at_load(monkeypatch):
    monkeypatch.setattr(module, "is_one_launch", lambda *_: True)
    shape = AttentionShape(2, 1, 32, (None,))
    pool = KVPool(KVShape(shape, torch.bfloat16), 3, 16, torch.device("cpu"))
    layer = AttentionLayer(0, shape, Rotary(rotary_table(32, 64, 10000.0)))
    with pytest.raises(TypeError, match=r"key_pool is torch\.bfloat16; want torch\.float16"):
        choose_store(layer, pool, torch.float16)


def test_norms_of_queries_and_keys_that_differ_are_refused():
    shape = AttentionShape(2, 1, 32, (None,))
    pool = KVPool(KVShape(shape, torch.float32), 3, 16, torch.device("cpu"))
    norms = RMSNorm(torch.ones(32), 1e-6), RMSNorm(torch.ones(32), 1e-6, weight_offset=1.0)
    says = r"attention layer 0: the norm of queries has .*'weight_offset': 0\.0.*keys.*: 1\.0"
    with pytest.raises(ValueError, match=says):
        choose_store(AttentionLayer(0, shape, None, *norms), pool, torch.float32)


@pytest.mark.parametrize(
    ("runs_kernel", "head_dim", "rotary_dims", "names"),
    [
        (True, 128, {128, 0}, ["rope_store"]),
        (True, 96, {72}, ["apply_rotary", "rms_norm"]),  # 36 pairs are no whole vectors
        (True, 96, {72, 0}, ["rope_store", "apply_rotary", "rms_norm"]),
        (False, 128, {64, 0}, ["rope_store", "apply_rotary", "rms_norm"]),
        (False, 128, {0}, ["rope_store", "rms_norm"]),
        (True, 100, {0}, ["rms_norm"]),
    ],
)
def test_a_model_loads_what_its_rotary_widths_ask_for(
    monkeypatch, runs_kernel, head_dim, rotary_dims, names
):
    monkeypatch.setattr(module, "may_run_kernel", lambda *_: runs_kernel)
    called = {
        norms: module.store_kernels(head_dim, rotary_dims, norms, torch.device("cpu"), {})
        for norms in (True, False)
    }
    assert [spec.name for spec in called[True]] == names
    assert [spec.name for spec in called[False]] == [one for one in names if one != "rms_norm"]


@pytest.mark.parametrize(
    ("mode", "choice", "kinds", "head_dim", "wanted"),
    [
        ("torch", "auto", (torch.bfloat16, torch.bfloat16), 128, False),
        ("host", "auto", (torch.float16, torch.float16), 128, True),
        ("host-check", "jit", (torch.float32, torch.float32), 128, True),
        ("host", "torch", (torch.bfloat16, torch.bfloat16), 128, False),
        ("host", "auto", (torch.bfloat16, torch.bfloat16), 100, False),
        ("host", "auto", (torch.bfloat16, torch.float8_e4m3fn), 128, True),
        ("host", "auto", (torch.float16, torch.float8_e4m3fn), 128, False),
    ],
)
def test_a_cpu_takes_one_launch_only_where_it_runs_kernels(
    monkeypatch, mode, choice, kinds, head_dim, wanted
):
    environment = Env(cpu_kernels=mode, kernels=dict.fromkeys(families(), choice))
    monkeypatch.setattr(implementations, "settings", lambda: environment)
    monkeypatch.setattr(implementations, "_decided", {})
    pool = torch.empty(1, 1, 16, head_dim, dtype=kinds[1])
    assert module.is_one_launch(pool, kinds[0], head_dim) is wanted
