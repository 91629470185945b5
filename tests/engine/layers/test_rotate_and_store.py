"""One launch and an operation for each part leave the same queries and the same pool."""

from __future__ import annotations

import pytest
import torch

from kiln.engine.attention.context import AttentionContext, attention_context
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.attention.torch_attention import TorchStep
from kiln.engine.attention.workspace import Workspace
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.layers import rotate_and_store as module
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.rotary import Rotary
from kiln.jit_kernels.choose import Choice
from kiln.jit_kernels.ops.kv import functions as kv
from kiln.jit_kernels.ops.rotary.table import rotary_table
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.toolchains import host

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 7, 4, 2, 32


def run(dtype, norms):
    """The query, and layer 1 of the pool, after a step of 7 tokens."""
    torch.manual_seed(7)
    pool = KVPool(KVShape(2, KV_HEADS, HEAD_DIM, dtype), 3, 16, torch.device("cpu"))
    qkv = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    query, key, value = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    nothing = torch.empty(0, dtype=torch.int32)
    slots = torch.randperm(48)[:TOKENS]
    metadata = AttentionMetadata(slots, nothing, nothing, nothing, (), (), 16)
    norm = [RMSNorm(torch.rand(HEAD_DIM).to(dtype), 1e-3) if norms else None for _ in range(2)]
    rotary = Rotary(rotary_table(HEAD_DIM, 64, 10000.0))
    with attention_context(AttentionContext(metadata, pool, TorchStep(pool, {}, Workspace(dtype)))):
        got = module.rotate_and_store(
            1, torch.randint(64, (TOKENS,)), query, key, value, rotary, *norm
        )
    assert not any(part.any() for part in pool.layer(0))
    return got, *pool.layer(1)


@pytest.fixture
def launches(monkeypatch):
    """Take the one launch, and count how often."""
    seen = []

    def launch(spec, **named):
        seen.append(spec.name)
        host.run(spec, spec.parameters.Arguments(**named), env=settings())

    monkeypatch.setattr(kv, "call", launch)
    monkeypatch.setattr(module, "is_one_launch", lambda *_: True)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norms", [False, True])
def test_one_launch_does_what_the_parts_do(request, dtype, norms):
    parts = run(dtype, norms)
    seen = request.getfixturevalue("launches")
    once = run(dtype, norms)
    assert seen == ["rope_store"]
    bound = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]  # torch rounds elsewhere
    for a, b in zip(parts, once, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


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
    class Settings:
        cpu_kernels = mode

        def kernel_choice(self, family):
            return choice

    monkeypatch.setattr(kv, "settings", Settings)
    monkeypatch.setattr(kv, "is_one_launch", kv.is_one_launch.__wrapped__)
    assert kv.is_one_launch("cpu", *kinds, head_dim, head_dim) is wanted


@pytest.mark.parametrize(
    ("chosen", "fp16_in_fp8", "bf16"),
    [("jit", False, True), ("triton", True, True), ("torch", False, False)],
)
def test_on_a_gpu_it_is_one_launch_where_the_choice_has_a_kernel(
    monkeypatch, chosen, fp16_in_fp8, bf16
):
    decide = kv.is_one_launch.__wrapped__
    monkeypatch.setattr(kv, "choice", lambda family: Choice(family, chosen, ""))
    assert decide("cuda", torch.float16, torch.float8_e4m3fn, 64, 64) is fp16_in_fp8
    assert decide("cuda", torch.bfloat16, torch.bfloat16, 64, 64) is bf16
    assert decide("cuda", torch.bfloat16, torch.bfloat16, 20, 20) is False
