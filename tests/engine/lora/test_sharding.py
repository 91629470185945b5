"""An adapter split over ranks: together the ranks add what the whole adapter adds."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from projections import dense, whole_projection

from kiln.engine.errors import ConfigError
from kiln.engine.layers.embedding import Embedding
from kiln.engine.lora import base_weights
from kiln.engine.lora.adapter import Adapter, LoRAPair
from kiln.engine.lora.base_weights import BaseWeights
from kiln.engine.lora.sharding import Shard
from kiln.engine.lora.sites import Kind, Sites
from kiln.engine.models.split import Split

HEADS, KV_HEADS, HEAD, HIDDEN, INNER, VOCAB = 8, 2, 3, 5, 16, 13
Q, KV = HEADS * HEAD, KV_HEADS * HEAD


LAYERS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
    "shared_expert_gate": ("shared_expert_gate",),
    "lm_head": ("lm_head",),
}


def model_sites():
    sites = Sites()
    sites.embedding("model.embed_tokens", Embedding(torch.zeros(VOCAB, HIDDEN)))
    for name, parts, size in (
        ("qkv_proj", (("q_proj", Q), ("k_proj", KV), ("v_proj", KV)), HIDDEN),
        ("o_proj", (("o_proj", HIDDEN),), Q),
        ("gate_up_proj", (("gate_proj", INNER), ("up_proj", INNER)), HIDDEN),
        ("down_proj", (("down_proj", HIDDEN),), INNER),
        ("shared_expert_gate", (("shared_expert_gate", 1),), HIDDEN),
        ("lm_head", (("lm_head", VOCAB),), HIDDEN),
    ):
        own = sum(width for _, width in parts)
        projection = whole_projection(f"model.{name}", dict(parts), size)
        sites.linear(projection, dense(torch.zeros(own, size)))
    return sites


def whole_adapter(sites):
    made = {}
    for index, part in enumerate(sites.parts):
        rank = index % 3 + 1
        a, b = torch.randn(rank, part.input_size), torch.randn(part.output_size, rank)
        made[part.row] = LoRAPair(a.double(), b.double(), 0.5 + index)
    del made[sites.parts[2].row]  # k has no rank
    return Adapter("a", made)


class Stored(NamedTuple):
    """A slice of a file, as safetensors gives it."""

    tensor: torch.Tensor

    def get_shape(self):
        return list(self.tensor.shape)

    def __getitem__(self, rows):
        return self.tensor[rows]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_changed_base_weight_is_found_by_the_ranks_that_have_it(world, monkeypatch):
    """By all of the ranks that share a KV head, or have a layer whole; else by one rank."""
    monkeypatch.setattr(base_weights, "_CHUNK", 11)  # elements: some rows at once
    whole = model_sites()
    weights = {
        part.row: torch.randn(part.input_size, part.output_size)
        if site.kind is Kind.EMBEDDING
        else torch.randn(part.output_size, part.input_size)
        for site in whole.all
        for part in site.parts
    }
    ranks = []
    for shard in (Shard(Split(rank, world), KV_HEADS) for rank in range(world)):
        own = Sites()
        for site in whole.all:
            cut = []
            for part in site.parts:
                outputs, inputs = shard.places(site, part)
                rows = (inputs, outputs) if site.kind is Kind.EMBEDDING else (outputs, inputs)
                cut.append(weights[part.row][rows])
            padded = torch.cat([*cut, torch.zeros(1, cut[0].shape[1])])  # as behind a share
            if site.kind is Kind.EMBEDDING:
                own.embedding(site.parts[0].name, Embedding(padded))
                continue
            name = next(name for name, parts in LAYERS.items() if site.parts[0].name in parts)
            sizes = {part.name: len(each) for part, each in zip(site.parts, cut, strict=True)}
            own.linear(whole_projection(name, sizes, cut[0].shape[1]), dense(padded))
        ranks.append(BaseWeights(own.all, shard.places))
    for site in whole.all:
        for part in site.parts:
            good = weights[part.row]
            assert all(one.first_difference(site, part, Stored(good)) is None for one in ranks)
            for row in {0, len(good) // 2, len(good) - 1}:
                changed = good.clone()
                changed[row, -1] += 1
                found = [one.first_difference(site, part, Stored(changed)) for one in ranks]
                assert set(found) <= {row, None}
                assert found.count(row) >= 1


def delta(pair, x):
    return pair.scale * x @ pair.a.T @ pair.b.T


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_ranks_together_add_what_the_whole_adapter_adds(world):
    sites = model_sites()
    adapter = whole_adapter(sites)
    ranks = [Shard(Split(rank, world), KV_HEADS) for rank in range(world)]
    shards = [rank.adapter(adapter, sites.all) for rank in ranks]
    for site in sites.all:
        for part in site.parts:
            if part.row not in adapter.pairs:
                assert all(part.row not in shard.pairs for shard in shards)
                continue
            own = [shard.pairs[part.row] for shard in shards]
            x = torch.randn(7, part.input_size).double()
            want = delta(adapter.pairs[part.row], x)
            if own[0].a.shape[1] < part.input_size or site.kind is Kind.EMBEDDING:
                inputs = x.split([pair.a.shape[1] for pair in own], 1)
                got = sum(delta(pair, part_x) for pair, part_x in zip(own, inputs, strict=True))
            else:
                columns = [delta(pair, x) for pair in own]
                if part.name in ("k_proj", "v_proj") and world > KV_HEADS:
                    columns = columns[:: world // KV_HEADS]  # neighbours share a head
                elif part.name == "shared_expert_gate":
                    columns = columns[:1]  # all ranks have the whole layer
                got = torch.cat(columns, 1) if world > 1 else columns[0]
            torch.testing.assert_close(got, want)


def test_ranks_that_share_a_head_have_the_same_weights():
    sites = model_sites()
    adapter = whole_adapter(sites)
    row = sites.parts[3].row
    assert sites.parts[3].name == "v_proj"
    own = [
        Shard(Split(rank, 8), KV_HEADS).adapter(adapter, sites.all).pairs[row].b
        for rank in range(8)
    ]
    assert {b.shape[0] for b in own} == {HEAD}
    assert [b.data_ptr() == own[0].data_ptr() for b in own] == [True] * 4 + [False] * 4


def test_the_memory_of_the_ranks_is_that_of_the_adapter_but_for_what_all_need():
    sites = model_sites()
    adapter = whole_adapter(sites)
    gate_up = next(site for site in sites.all if site.kind is Kind.GATE_UP)
    shard = Shard(Split(1, 4), KV_HEADS).adapter(adapter, sites.all)
    for part in gate_up.parts:
        whole, own = adapter.pairs[part.row], shard.pairs[part.row]
        assert own.a.data_ptr() == whole.a.data_ptr()
        assert own.b.numel() * 4 == whole.b.numel()


@pytest.mark.parametrize(
    ("world", "kv_heads", "says"),
    [
        (5, KV_HEADS, "tensor_parallel_size=5: q_proj has 24 outputs, not a multiple of 5"),
        (
            4,
            3,
            "tensor_parallel_size=4: v_proj has 3 heads, and neither number is a multiple",
        ),
    ],
)
def test_sizes_that_cannot_be_split_are_refused_by_name(world, kv_heads, says):
    sites = model_sites()
    with pytest.raises(ConfigError, match=says):
        Shard(Split(0, world), kv_heads).adapter(whole_adapter(sites), sites.all)
