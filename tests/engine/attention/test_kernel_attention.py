"""Attention by Kiln's kernels in the engine: what they give, and when they are chosen."""

from __future__ import annotations

import pytest
import torch

from kiln.cache.env import read
from kiln.engine.attention import choose
from kiln.engine.attention.choose import kernels_attend
from kiln.engine.attention.context import attend, attention_context
from kiln.engine.attention.kernel_attention import KernelAttention, Limits
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.attention.torch_attention import TorchAttention
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.jit_kernels.families import families
from kiln.jit_kernels.ops.attention_decode import functions as decode_functions
from kiln.jit_kernels.ops.attention_prefill import functions as prefill_functions
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.toolchains import host

CPU = torch.device("cpu")
KV_HEADS, GROUP, HEAD_DIM = 2, 3, 64
MIXED = [(3, 1), (0, 7), (40, 1), (0, 30), (300, 1), (20, 40), (0, 1), (50, 16), (50, 17)]


@pytest.fixture
def launches(monkeypatch):
    """Run the kernels' own source, and list what is launched."""
    seen = []

    def launch(spec, **named):
        seen.append(spec.name)
        host.run(spec, spec.parameters.Arguments(**named), env=settings())

    for functions in (decode_functions, prefill_functions):
        monkeypatch.setattr(functions, "call", launch)
    return seen


def step(requests, window, kernels, dtype=torch.bfloat16, kv_dtype=None):
    """Return the attention of two layers in a step of requests (tokens before, new tokens)."""
    torch.manual_seed(1)
    blocks = [-(-(before + new) // 16) for before, new in requests]
    order = torch.randperm(sum(blocks) + 2).to(torch.int32).split([*blocks, 2])[:-1]
    table = torch.zeros(len(requests), max(blocks), dtype=torch.int32)
    for row, own in zip(table, order, strict=True):
        row[: len(own)] = own
    slots = [
        table[row, place // 16] * 16 + place % 16
        for row, (before, new) in enumerate(requests)
        for place in range(before, before + new)
    ]
    news = [new for _, new in requests]
    lengths = [before + new for before, new in requests]
    metadata = AttentionMetadata(
        slot_mapping=torch.stack(slots).long(),
        block_table=table,
        cu_seqlens_q=torch.tensor([0, *news]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_lens=tuple(news),
        kv_lens=tuple(lengths),
        block_size=16,
    )
    shape = KVShape(2, KV_HEADS, HEAD_DIM, kv_dtype or dtype)
    pool = KVPool(shape, sum(blocks) + 2, 16, CPU, by_head=kernels)
    attention = TorchAttention([window], dtype)
    if kernels:
        limits = Limits(len(requests), sum(news), max(lengths))
        attention = KernelAttention(shape, KV_HEADS * GROUP, [window], limits, CPU)
    old = torch.randn(2, 2, pool.num_blocks * 16, KV_HEADS, HEAD_DIM).to(dtype)
    every_slot = torch.arange(pool.num_blocks * 16)
    outputs = []
    with attention_context(attention.context(metadata, pool)):
        for layer in range(2):
            pool.store(layer, every_slot, *old[layer])
            query = torch.randn(sum(news), KV_HEADS * GROUP, HEAD_DIM).to(dtype)
            outputs.append(attend(layer, query, 0.2, window))
    return torch.stack(outputs)


@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_and_torch_agree(launches, window, dtype):
    wanted = step(MIXED, window, kernels=False, dtype=torch.float32)
    torch_error = (step(MIXED, window, False, dtype).float() - wanted).abs().max()
    error = (step(MIXED, window, True, dtype).float() - wanted).abs().max()
    assert error <= 1.5 * torch_error
    assert launches.count("paged_attention") == 2


def test_with_a_pool_of_8_bits_they_agree_too(launches):
    e4m3 = torch.float8_e4m3fn
    wanted = step(MIXED, 25, kernels=False, dtype=torch.float32, kv_dtype=e4m3)
    torch_error = (step(MIXED, 25, False, kv_dtype=e4m3).float() - wanted).abs().max()
    error = (step(MIXED, 25, True, kv_dtype=e4m3).float() - wanted).abs().max()
    assert error <= 1.5 * torch_error
    assert launches.count("paged_attention") == 2


def test_a_step_launches_only_what_has_work(launches):
    step([(20, 1), (0, 16)], None, kernels=True)
    assert launches == ["attention_plan", *["paged_attention"] * 2]
    launches.clear()
    step([(20, 30)], None, kernels=True)
    assert not {"attention_plan", "paged_attention"} & set(launches)
    assert len(launches) == 3


@pytest.mark.parametrize(
    ("environ", "needs", "block_size", "wanted"),
    [
        ({"KILN_CPU_KERNELS": "host"}, {}, 16, True),
        ({"KILN_CPU_KERNELS": "host-check", "KILN_ATTENTION_PREFILL": "torch"}, {}, 16, True),
        (
            {
                "KILN_CPU_KERNELS": "host",
                "KILN_ATTENTION_PREFILL": "torch",
                "KILN_ATTENTION_DECODE": "torch",
            },
            {},
            16,
            False,
        ),
        ({}, {}, 16, False),
        ({"KILN_CPU_KERNELS": "host"}, {"scalar_t": "float"}, 16, False),
        ({"KILN_CPU_KERNELS": "host"}, {"head_tile": "24"}, 16, False),
        ({"KILN_CPU_KERNELS": "host"}, {}, 7, False),
    ],
    ids=["host", "one-family", "neither", "torch", "float32", "head-dim", "block-size"],
)
def test_kernels_attend_where_they_can_and_may(monkeypatch, environ, needs, block_size, wanted):
    env = read(families(), environ)
    monkeypatch.setattr(choose, "settings", lambda: env)
    needs = {"scalar_t": "kiln::bf16", "head_tile": "64", **needs}
    assert kernels_attend(CPU, needs, block_size) == wanted
