"""Attention by Kiln's kernels in the engine: what they give, and what is launched."""

from __future__ import annotations

import itertools

import pytest
import torch
from depth import at_depth

from kiln.engine.attention.kernel_attention import KernelAttention, Limits
from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.attention.torch_attention import TorchAttention
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.shape import AttentionShape, Window
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


class Step:
    """A step of requests (tokens before, new tokens) over random blocks, for one layer."""

    def __init__(self, requests, dtype, kv_dtype=None, head_dim=HEAD_DIM, **options):
        torch.manual_seed(1)
        self.requests, self.dtype = requests, dtype
        window = options.pop("window", None)
        self.heads = AttentionShape(KV_HEADS * GROUP, KV_HEADS, head_dim, (None, window))
        self.shape = KVShape(self.heads, kv_dtype or dtype)
        self.layer = AttentionLayer(1, self.heads, Rotary(torch.empty(0)), **options)
        blocks = [-(-(before + new) // 16) for before, new in requests]
        self.num_blocks = sum(blocks) + 2
        order = torch.randperm(self.num_blocks).to(torch.int32).split([*blocks, 2])[:-1]
        self.table = torch.zeros(len(requests), max(blocks), dtype=torch.int32)
        for row, own in zip(self.table, order, strict=True):
            row[: len(own)] = own
        self.news = [new for _, new in requests]
        size = (self.num_blocks * 16, KV_HEADS, head_dim)
        self.keys, self.values = (torch.randn(size).to(dtype) for _ in range(2))
        self.query = torch.randn(sum(self.news), KV_HEADS * GROUP, head_dim).to(dtype)

    def slots(self, row, first, last):
        places = torch.arange(first, last)
        return self.table[row, places // 16].long() * 16 + places % 16

    def metadata(self):
        ends = [sum(request) for request in self.requests]
        slots = [self.slots(row, end - self.news[row], end) for row, end in enumerate(ends)]
        return AttentionMetadata(
            slot_mapping=torch.cat(slots),
            block_table=self.table,
            cu_seqlens_q=torch.tensor([0, *self.news]).cumsum(0).to(torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            query_lens=tuple(self.news),
            kv_lens=tuple(ends),
            block_size=16,
        )

    def run(self, *, kernels):
        """Return the output of one of the implementations, and the pool."""
        pool = KVPool(self.shape, self.num_blocks, 16, CPU, by_head=kernels)
        limits = Limits(len(self.requests), sum(self.news), max(map(sum, self.requests)))
        attention = (
            KernelAttention(self.shape, limits, CPU)
            if kernels
            else TorchAttention(self.heads.windows, self.dtype)
        )
        every, scales = torch.arange(self.num_blocks * 16), (self.layer.k_scale, self.layer.v_scale)
        pool.store(1, every, self.keys, self.values, *scales)
        out = torch.full_like(self.query, float("nan"))
        plan = attention.plan(self.metadata())
        attention.bind(self.layer, pool, self.dtype)(plan, self.query, out)
        return out, pool

    def expected(self, pool):
        """Return attention over the pool's keys and values in float64, and over |values|."""
        layer, outs = self.layer, []
        stored = [one.reshape(-1, KV_HEADS, self.heads.head_dim).double() for one in pool.blocks(1)]
        keys, values = stored[0] * layer.k_scale, stored[1] * layer.v_scale
        for row, query in enumerate(self.query.double().split(self.news)):
            end = sum(self.requests[row])
            slots, places = self.slots(row, 0, end), torch.arange(end)
            own = [one[slots].repeat_interleave(GROUP, 1) for one in (keys, values)]
            scale = layer.scale or self.heads.head_dim**-0.5
            logits = torch.einsum("thd,lhd->htl", query, own[0]) * scale
            if layer.soft_cap:
                logits = layer.soft_cap * (logits / layer.soft_cap).tanh()
            token, window = places[end - len(query) :, None], layer.window or Window(10**6)
            seen = token - places < window.size
            if window.chunked:
                seen = token // window.size == places // window.size
            logits.masked_fill_(~(seen & (places <= token)), -torch.inf)
            if layer.sinks is not None:
                sinks = layer.sinks.double()[:, None, None].expand(-1, len(query), 1)
                logits = torch.cat((logits, sinks), -1)
            weights = logits.softmax(-1)[..., :end]
            outs += [torch.einsum("htl,lhd->thd", weights, one) for one in (own[1], own[1].abs())]
        return torch.cat(outs[::2]), torch.cat(outs[1::2])


E4M3 = torch.float8_e4m3fn
# A float32 path differs by rounding of float32. A 16-bit one rounds weights, outputs, and outputs
# that are multiplied by v_scale.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3 * 2**-8, torch.float16: 3 * 2**-11}
WINDOWS = [None, Window(25), Window(32, chunked=True), Window(7, chunked=True)]
OPTIONS = [
    {"window": window, "soft_cap": cap, "scale": scale, "sinks": sinks, "kv_dtype": kv_dtype}
    for kv_dtype in (None, E4M3)
    for window, cap, scale, sinks in itertools.product(
        WINDOWS, (0.0, 2.0), (None, 0.3), (None, torch.linspace(-2, 4, KV_HEADS * GROUP))
    )
]


def agree(step, kernels):
    out, pool = step.run(kernels=kernels)
    wanted, magnitude = step.expected(pool)
    rounding = BOUNDS[step.dtype] * (magnitude + torch.finfo(step.dtype).tiny)
    assert ((out.double() - wanted).abs() <= rounding).all()


def step_of(dtype, head_dim, kv_dtype=None, **options):
    scales = {} if kv_dtype is None else {"k_scale": 0.37, "v_scale": 2.5}
    return Step(MIXED, dtype, kv_dtype, head_dim, **options, **scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS[:: at_depth(7, 1)])
def test_torch_gives_what_a_layer_asks_for(dtype, options):
    agree(step_of(dtype, 16, **options), kernels=False)


@pytest.mark.parametrize("options", OPTIONS[:: at_depth(21, 1)])
def test_kernels_give_what_a_layer_asks_for(launches, options):
    """With heads above 64: prefill has no other kernels with a soft cap."""
    agree(step_of(torch.bfloat16, 80, **options), kernels=True)
    assert launches.count("paged_attention") == launches.count("paged_prefill") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", WINDOWS[1 :: at_depth(2, 1)])
def test_kernels_of_small_heads_give_windows_and_sinks(launches, dtype, window):
    agree(step_of(dtype, 64, window=window, sinks=torch.zeros(KV_HEADS * GROUP)), kernels=True)


def test_a_window_that_hides_no_key_is_planned_as_none(launches):
    limits, heads = Limits(2, 8, 32), (6, 2, 64)
    windows = (None, Window(32), Window(40, chunked=True), Window(31), Window(31, chunked=True))
    shape = KVShape(AttentionShape(*heads, windows), torch.bfloat16)
    attention, pool = KernelAttention(shape, limits, CPU), KVPool(shape, 3, 16, CPU, by_head=True)
    bound = [
        attention.bind(
            AttentionLayer(n, shape.attention, Rotary(torch.empty(0))), pool, shape.dtype
        )
        for n in range(5)
    ]
    assert [one.arguments["window"] for one in bound] == [0, 0, 0, 31, -31]
    for one in bound:
        assert {*one.decode.items} == {*one.prefill.items} == {-31, 0, 31}


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
    Step([(20, 1), (0, 16)], torch.bfloat16).run(kernels=True)
    assert launches == ["shared_blocks", "attention_plan", "paged_attention"]
    launches.clear()
    Step([(20, 30)], torch.bfloat16).run(kernels=True)
    assert launches == ["prefill_plan", "paged_prefill"]
