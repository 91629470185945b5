"""Attention by Kiln's kernels in the engine: what they give, and what is launched."""

from __future__ import annotations

import pytest
import torch

from kiln.engine.attention.kernel_attention import KernelAttention, Limits
from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.attention.torch_attention import TorchAttention
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.shape import AttentionShape
from kiln.engine.layers.rotary import Rotary
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.toolchains import host

CPU = torch.device("cpu")
KV_HEADS, GROUP, HEAD_DIM = 2, 3, 64
MIXED = [(3, 1), (0, 7), (40, 1), (0, 30), (300, 1), (20, 40), (0, 1), (50, 16), (50, 17)]


@pytest.fixture
def launches(monkeypatch):
    """Run the kernels' own source, and list what is launched."""
    seen = []

    def instead_of(spec):
        def launch(*arguments):
            seen.append(spec.name)
            host.run(spec, spec.arguments(arguments), env=settings())

        return launch

    with torch.library._scoped_library("kiln", "IMPL") as library:
        decode = ("shared_blocks", "attention_plan", "paged_attention")
        for name in (*decode, "prefill_plan", "paged_prefill"):
            library.impl(name, instead_of(all_specs()[name]), "CPU", allow_override=True)
        yield seen


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
    heads = AttentionShape(KV_HEADS * GROUP, KV_HEADS, HEAD_DIM, (window, window))
    shape = KVShape(heads, kv_dtype or dtype)
    pool = KVPool(shape, sum(blocks) + 2, 16, CPU, by_head=kernels)
    attention = TorchAttention([window], dtype)
    if kernels:
        limits = Limits(len(requests), sum(news), max(lengths))
        attention = KernelAttention(shape, limits, CPU)
    old = torch.randn(2, 2, pool.num_blocks * 16, KV_HEADS, HEAD_DIM).to(dtype)
    every_slot = torch.arange(pool.num_blocks * 16)
    outputs = []
    plan = attention.plan(metadata)
    for index in range(2):
        layer = AttentionLayer(index, heads, Rotary(torch.empty(0)))
        pool.store(index, every_slot, *old[index])
        query = torch.randn(sum(news), KV_HEADS * GROUP, HEAD_DIM).to(dtype)
        outputs.append(torch.full_like(query, float("nan")))
        attention.bind(layer, pool, dtype)(plan, query, outputs[-1])
    return torch.stack(outputs)


@pytest.mark.quick(1)
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


def test_a_pool_that_does_not_fit_the_layer_is_refused_at_load():
    shape = KVShape(AttentionShape(6, 2, 64, (None,)), torch.bfloat16)
    attention = KernelAttention(shape, Limits(2, 8, 32), CPU)
    layer = AttentionLayer(0, shape.attention, Rotary(torch.empty(0)))
    fits = KVPool(shape, 3, 16, CPU, by_head=True)
    attention.bind(layer, fits, torch.bfloat16)
    with pytest.raises(TypeError, match=r"key_pool is torch\.bfloat16, want torch\.float16"):
        attention.bind(layer, fits, torch.float16)
    with pytest.raises(ValueError, match="key_pool is"):
        attention.bind(layer, KVPool(shape, 3, 8, CPU, by_head=True), torch.bfloat16)


def test_a_step_launches_only_what_has_work(launches):
    step([(20, 1), (0, 16)], None, kernels=True)
    assert launches == ["shared_blocks", "attention_plan", *["paged_attention"] * 2]
    launches.clear()
    step([(20, 30)], None, kernels=True)
    assert not {"shared_blocks", "attention_plan", "paged_attention"} & set(launches)
    assert len(launches) == 3
