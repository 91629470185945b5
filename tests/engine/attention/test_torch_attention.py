"""Paged attention against a float64 loop, over random block tables, NaN in every other slot."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.attention.plan import plan_attention
from kiln.engine.attention.torch_attention import TorchAttention, Workspace
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.shape import AttentionShape, Window
from kiln.engine.layers.rotary import Rotary

HEAD_DIM = 8
chunks = partial(Window, chunked=True)


class Requests:
    """Requests of (tokens before, new tokens), with a pool that holds what came before."""

    def __init__(self, sizes, block_size, kv_heads=2, group=3, seed=0):
        self.sizes, self.block_size, self.group = sizes, block_size, group
        torch.manual_seed(seed)
        counts = [-(-(before + new) // block_size) for before, new in sizes]
        num_blocks = sum(counts) + 3
        ids = random.Random(seed).sample(range(num_blocks), sum(counts))
        self.blocks = [[ids.pop() for _ in range(count)] for count in counts]
        self.heads = kv_heads * group, kv_heads, HEAD_DIM
        shape = KVShape(AttentionShape(*self.heads, (None,)), torch.float32)
        self.pool = KVPool(shape, num_blocks, block_size, torch.device("cpu"))
        for tensor in self.pool.layer(0):
            tensor.fill_(float("nan"))
        lengths = [before + new for before, new in sizes]
        self.keys = [torch.randn(length, kv_heads, HEAD_DIM) for length in lengths]
        self.values = [torch.randn(length, kv_heads, HEAD_DIM) for length in lengths]
        self.queries = [torch.randn(new, kv_heads * group, HEAD_DIM) for _, new in sizes]
        for row, (before, _) in enumerate(sizes):
            old = torch.tensor(self.slots(row, 0, before), dtype=torch.int64)
            self.pool.store(0, old, self.keys[row][:before], self.values[row][:before])

    def slots(self, row, first, last):
        size, blocks = self.block_size, self.blocks[row]
        return [blocks[p // size] * size + p % size for p in range(first, last)]

    def metadata(self, rows):
        lens = [sum(self.sizes[row]) for row in rows]
        new = [self.sizes[row][1] for row in rows]
        slots = [s for r in rows for s in self.slots(r, self.sizes[r][0], sum(self.sizes[r]))]
        width = max(len(self.blocks[row]) for row in rows)
        table = [self.blocks[row] + [0] * (width - len(self.blocks[row])) for row in rows]
        return AttentionMetadata(
            slot_mapping=torch.tensor(slots),
            block_table=torch.tensor(table, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *new]).cumsum(0).to(torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            query_lens=tuple(new),
            kv_lens=tuple(lens),
            block_size=self.block_size,
        )

    def attend(self, rows=None, window=None, **options):
        rows = list(range(len(self.sizes))) if rows is None else rows
        metadata = self.metadata(rows)
        new = [slice(self.sizes[row][0], None) for row in rows]
        key = torch.cat([self.keys[row][part] for row, part in zip(rows, new, strict=True)])
        value = torch.cat([self.values[row][part] for row, part in zip(rows, new, strict=True)])
        query = torch.cat([self.queries[row] for row in rows])
        attention = TorchAttention([window], torch.float32)
        layer = self.layer(window, **options)
        attend = attention.bind(layer, self.pool, torch.float32)
        self.pool.store(0, metadata.slot_mapping, key, value)
        out = torch.full_like(query, float("nan"))
        attend(attention.plan(metadata), query, out)
        return out.split(list(metadata.query_lens))

    def layer(self, window=None, **options):
        shape = AttentionShape(*self.heads, (window,))
        return AttentionLayer(0, shape, Rotary(torch.empty(0)), **options)

    def expected(self, row, window=None, scale=None, soft_cap=0.0, sinks=None):
        before, new = self.sizes[row]
        scale = HEAD_DIM**-0.5 if scale is None else scale
        out = torch.empty(new, *self.queries[row].shape[1:], dtype=torch.float64)
        for token in range(new):
            end = before + token + 1
            start = 0
            if window is not None and window.chunked:
                start = (end - 1) // window.size * window.size
            elif window is not None:
                start = max(end - window.size, 0)
            for head in range(out.shape[1]):
                keys = self.keys[row][start:end, head // self.group].double()
                values = self.values[row][start:end, head // self.group].double()
                scores = keys @ self.queries[row][token, head].double() * scale
                if soft_cap:
                    scores = soft_cap * (scores / soft_cap).tanh()
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                out[token, head] = scores.softmax(0)[: len(values)] @ values
        return out


def check(requests, window=None, **options):
    for row, out in enumerate(requests.attend(window=window, **options)):
        wanted = requests.expected(row, window, **options)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)


DECODES = [(0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (40, 1), (5, 1)]
CHUNKS = [(0, 2), (0, 16), (7, 9), (16, 16), (33, 5)]
MIXED = [(3, 1), (0, 7), (20, 1), (9, 4), (0, 1), (31, 1)]


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("sizes", [DECODES, CHUNKS, MIXED], ids=["decodes", "chunks", "mixed"])
@pytest.mark.parametrize("window", [None, *map(Window, (1, 4, 16, 1000)), *map(chunks, (1, 5, 32))])
def test_attention_is_the_float64_loop(sizes, block_size, window):
    check(Requests(sizes, block_size), window)


@pytest.mark.parametrize("window", [None, Window(6), chunks(7)])
@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_layer_may_have_a_scale_a_soft_cap_and_sinks(window, scale, soft_cap, sinks):
    sizes, sinks = [*MIXED, (20, 1), (0, 9)], torch.tensor([4.0, -4, 2, 0, 1, 3]) if sinks else None
    check(Requests(sizes, 4), window, scale=scale, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 8), (4, 1), (3, 2)])
def test_any_grouping_of_heads(kv_heads, group):
    check(Requests(MIXED, 4, kv_heads, group))


@pytest.mark.parametrize("window", [None, Window(300), chunks(160)])
def test_decode_rows_of_very_different_lengths(window):
    check(Requests([(700, 1), (2, 1), (300, 1), (140, 1), (0, 1), (5, 3)], 16), window)


def test_similar_lengths_share_a_gather_and_no_gather_is_mostly_padding():
    lengths = [1000, 10, 900, 5, 300, 120, 260]
    metadata = Requests([(length - 1, 1) for length in lengths], 16).metadata(range(7))
    groups = plan_attention(metadata, None, torch.float32).groups
    assert [group.length for group in groups] == [120, 300, 1000]
    assert [len(group.tokens) for group in groups] == [3, 2, 2]
    assert [group.tokens.tolist() for group in groups] == [[1, 3, 5], [4, 6], [0, 2]]


def test_a_window_shortens_what_is_gathered():
    metadata = Requests([(500, 1), (490, 10)], 16).metadata(range(2))
    plan = plan_attention(metadata, Window(32), torch.float32)
    assert plan.groups[0].length == 32
    assert plan.chunks[0].slots.numel() == 32 + 9
    plan = plan_attention(metadata, chunks(100), torch.float32)
    assert plan.groups[0].length == 1
    assert plan.chunks[0].slots.numel() == 100  # of the chunk that ends with the step


@pytest.mark.parametrize("sizes", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_a_row_is_the_same_alone_and_among_others(sizes):
    together = Requests(sizes, 4).attend()
    for row, out in enumerate(together):
        alone = Requests(sizes, 4).attend([row])[0]
        torch.testing.assert_close(out, alone, rtol=0, atol=1e-6)


def test_a_request_full_of_nan_does_not_touch_its_neighbours():
    clean, dirty = Requests(MIXED, 4), Requests(MIXED, 4)
    dirty.keys[1].fill_(float("nan"))
    dirty.values[1].fill_(float("nan"))
    pairs = list(zip(clean.attend(), dirty.attend(), strict=True))
    assert pairs[1][1].isnan().all()
    del pairs[1]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_workspace_is_reused_and_grows():
    keys, values = torch.randn(2, 20, 2, 4).unbind()
    workspace = Workspace(torch.float32)
    first = workspace.gather(keys, values, torch.tensor([3, 1]))[0].data_ptr()
    more = workspace.gather(keys, values, torch.tensor([4, 5, 6]))
    assert torch.equal(more[0], keys[4:7])
    assert torch.equal(more[1], values[4:7])
    again = workspace.gather(keys, values, torch.tensor([0]))
    assert again[0].data_ptr() == more[0].data_ptr() != first
    assert torch.equal(again[1], values[:1])
