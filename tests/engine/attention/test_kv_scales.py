"""Layers with scales of their own over a pool of 8-bit floats, against attention in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kiln.engine.attention import rotate_and_store
from kiln.engine.attention.context import AttentionStep
from kiln.engine.attention.kernel_attention import KernelAttention, Limits
from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.attention.paged_layer import bind_layers
from kiln.engine.attention.torch_attention import TorchAttention
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.shape import AttentionShape, Window
from kiln.engine.layers.rotary import Rotary
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.ops.rotary.table import rotary_table
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.toolchains import host

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 64, 16
KERNELS = ("rope_store", "shared_blocks", "attention_plan", "paged_attention", "prefill_plan",
           "paged_prefill")  # fmt: skip
SCALES = ((0.371, 21.3), (5.7, 0.0043))  # of the keys and values of two layers
REQUESTS = [(19, 1), (0, 30), (33, 17), (7, 3)]  # tokens of the first step, and of the second
SPREAD = 150  # codes are so large: some are beyond 448


@pytest.fixture
def kernels(monkeypatch):
    """Run the kernels' own source on the CPU, and list what is launched."""
    seen = []

    def instead_of(spec):
        def launch(*arguments):
            seen.append(spec.name)
            host.run(spec, spec.arguments(arguments), env=settings())

        return launch

    monkeypatch.setattr(rotate_and_store, "is_one_launch", lambda *_: True)
    with torch.library._scoped_library("kiln", "IMPL") as library:
        for name in KERNELS:
            library.impl(name, instead_of(all_specs()[name]), "CPU", allow_override=True)
        yield seen


class Run:
    """Two steps of two layers. Every token is at position 0, where rotation changes no bit."""

    def __init__(self, dtype, by_kernels):
        torch.manual_seed(2)
        self.heads = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, (None, Window(20)))
        shape, width = KVShape(self.heads, E4M3), max(map(sum, REQUESTS)) // BLOCK + 1
        self.pool = KVPool(shape, len(REQUESTS) * width, BLOCK, CPU, by_head=by_kernels)
        self.attention = TorchAttention(self.heads.windows, dtype)
        if by_kernels:
            limits = Limits(len(REQUESTS), sum(map(sum, REQUESTS)), width * BLOCK)
            self.attention = KernelAttention(shape, limits, CPU)
        rotary = Rotary(rotary_table(HEAD_DIM, 8, 10000.0))
        layer = AttentionLayer(0, self.heads, rotary)
        self.layers = [
            replace(layer, index=index, k_scale=key, v_scale=value)
            for index, (key, value) in enumerate(SCALES)
        ]
        self.bound = bind_layers(self.layers, self.pool, self.attention, dtype)
        order = torch.randperm(self.pool.num_blocks).to(torch.int32)
        self.table = order.view(len(REQUESTS), width)
        self.qkv = [[self.numbers(sum(one), *scales).to(dtype) for one in REQUESTS]
                    for scales in SCALES]  # fmt: skip

    def numbers(self, tokens, key, value):
        size = torch.tensor([1 / (SPREAD * key)] * HEADS + [SPREAD * key] * KV_HEADS
                            + [SPREAD * value] * KV_HEADS)  # fmt: skip
        return torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM) * size[:, None]

    def slots(self, row, first, last):
        places = torch.arange(first, last)
        return self.table[row, places // BLOCK].long() * BLOCK + places % BLOCK

    def step(self, bounds):
        """Run (first, last) tokens of each request; return the output of each layer."""
        rows = [row for row, (first, last) in enumerate(bounds) if last > first]
        counts = tuple(bounds[row][1] - bounds[row][0] for row in rows)
        ends = tuple(bounds[row][1] for row in rows)
        metadata = AttentionMetadata(
            slot_mapping=torch.cat([self.slots(row, *bounds[row]) for row in rows]),
            block_table=self.table[rows],
            cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            query_lens=counts,
            kv_lens=ends,
            block_size=BLOCK,
        )
        step = AttentionStep(self.bound, metadata, self.attention.plan(metadata))
        outputs = []
        for index in range(2):
            own = [self.qkv[index][row][slice(*bounds[row])] for row in rows]
            qkv = torch.cat(own).flatten(1)
            out = qkv.new_full((len(qkv), self.heads.query_size), torch.nan)
            self.bound[index](step, qkv, torch.zeros(len(qkv), dtype=torch.int64), out)
            outputs.append(out)
        return outputs

    def codes(self, index, row):
        """A request's keys and values [tokens, 2, KV_HEADS, HEAD_DIM] as the pool holds them."""
        scale = torch.tensor(SCALES[index], dtype=torch.float64)[:, None, None]
        exact = self.qkv[index][row].double()[:, HEADS:].unflatten(1, (2, KV_HEADS)) / scale
        return exact.clamp(-448, 448).to(E4M3)

    def expected(self, index, row):
        """Attention of the second step in float64, and of the values' magnitudes."""
        scale = torch.tensor(SCALES[index], dtype=torch.float64)[:, None, None]
        keys, values = (self.codes(index, row).double() * scale).unbind(1)
        (before, new), window = REQUESTS[row], self.heads.windows[index] or Window(1000)
        query = self.qkv[index][row][before:, :HEADS].double()
        keys, values = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (keys, values))
        logits = torch.einsum("thd,lhd->htl", query, keys) * HEAD_DIM**-0.5
        ends = torch.arange(before, before + new)[:, None]
        place = torch.arange(before + new)
        seen = (place <= ends) & (place > ends - window.size)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        found = [torch.einsum("htl,lhd->thd", weights, one) for one in (values, values.abs())]
        return [one.flatten(1) for one in found]


# A float32 path differs by rounding of float32. A 16-bit one rounds weights and outputs.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}


@pytest.mark.parametrize(
    ("dtype", "by_kernels"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float16, False),
     (torch.bfloat16, True)],
)  # fmt: skip
def test_a_layer_stores_and_attends_with_its_own_scales(request, dtype, by_kernels):
    launched = request.getfixturevalue("kernels") if by_kernels else []
    run = Run(dtype, by_kernels)
    run.step([(0, before) for before, _ in REQUESTS])
    outputs = run.step([(before, before + new) for before, new in REQUESTS])
    saturated = 0
    for index in range(2):
        rows = outputs[index].double().split([new for _, new in REQUESTS])
        stored = [one.reshape(-1, KV_HEADS, HEAD_DIM) for one in run.pool.blocks(index)]
        for row, out in enumerate(rows):
            slots, codes = run.slots(row, 0, sum(REQUESTS[row])), run.codes(index, row)
            for wanted, found in zip(codes.unbind(1), stored, strict=True):
                same = found.view(torch.uint8)[slots] == wanted.contiguous().view(torch.uint8)
                assert same.all()
            saturated += int((codes.float().abs() == 448).sum())
            wanted, magnitude = run.expected(index, row)
            assert ((out - wanted).abs() <= BOUNDS[dtype] * magnitude).all()
    assert saturated > 100
    assert set(launched) == set(KERNELS if by_kernels else ())


@pytest.mark.parametrize("one_launch", [False, True])
def test_a_pool_of_16_bits_takes_no_scales(monkeypatch, one_launch):
    monkeypatch.setattr(rotate_and_store, "is_one_launch", lambda *_: one_launch)
    heads = AttentionShape(2, 1, 32, (None,))
    pool = KVPool(KVShape(heads, torch.bfloat16), 3, 16, CPU)
    layer = AttentionLayer(0, heads, Rotary(rotary_table(32, 64, 10000.0)), v_scale=0.5)
    with pytest.raises(ValueError, match=r"layer 0: k_scale is 1\.0 and v_scale 0\.5, but a KV"):
        rotate_and_store.choose_store(layer, pool, torch.bfloat16)
