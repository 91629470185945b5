"""An adapter split over ranks: together the ranks add what the whole adapter adds."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from projections import dense

from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.weight import DenseWeight
from kiln.engine.lora import base_weights
from kiln.engine.lora.adapter import Adapter, LoRAPair
from kiln.engine.lora.base_weights import first_difference
from kiln.engine.lora.packing import pack
from kiln.engine.lora.sites import Kind, Sites
from kiln.engine.models.parameters import Projection
from kiln.engine.models.rotary_order import halves_of_pairs
from kiln.engine.models.split import Split, all_of, stacked

HEADS, KV_HEADS, HEAD, HIDDEN, INNER, VOCAB = 8, 2, 5, 5, 16, 13
WORLDS = [1, 2, 4, 8]


def sites_of(split):
    """The sites of a rank.

    Some projections are stored as one layer, as in Phi; in one, rotary pairs are neighbours.
    """
    sites, vocabulary = Sites(), split.vocabulary(VOCAB)
    hidden, inner = all_of(HIDDEN), split.equal(INNER, "mlp", "outputs")
    query = split.equal(HEADS * HEAD, "q", "outputs")
    keys = split.kv_heads(KV_HEADS, HEAD, "k")
    rows = vocabulary.room + (vocabulary.size < VOCAB)
    sites.embedding("embed_tokens", vocabulary, Embedding(torch.zeros(rows, HIDDEN)))
    for role, names, shares, inputs in (
        ("qkv_proj", ["q", "k", "v"], [query, keys, keys], hidden),
        ("qkv_proj", ["qkv"] * 3, stacked([query, keys, keys]), hidden),
        ("qkv_proj", ["paired_q", "paired_k", "paired_v"], [query, keys, keys], hidden),
        ("gate_up_proj", ["gate", "up"], [inner, inner], hidden),
        ("gate_up_proj", ["gate_up"] * 2, stacked([inner, inner]), hidden),
        ("o_proj", ["o"], [hidden], query),
        ("down_proj", ["down"], [hidden], inner),
        ("shared_expert_gate", ["shared_gate"], [all_of(1)], hidden),
        ("lm_head", ["head"], [vocabulary], hidden),
    ):
        parts = tuple(zip(names, shares, strict=False))
        order = ()
        if names[0] == "paired_q":
            order = halves_of_pairs((query.size + keys.size) // HEAD, HEAD, 4, keys.size)
        weight = torch.zeros(sum(share.room for share in shares), inputs.room)
        sites.linear(Projection(role, parts, inputs, order=order), dense(weight))
    return sites


def ranks_of(world):
    return [sites_of(Split(rank, world)) for rank in range(world)]


def whole_adapter():
    made = {}
    for part in sites_of(Split()).parts:
        rank, (outputs, inputs) = part.row % 3 + 1, part.whole_size
        a, b = torch.randn(rank, inputs), torch.randn(outputs, rank)
        made[part.row] = LoRAPair(a.double(), b.double(), 0.5 + part.row)
    del made[2]  # k has no rank
    return Adapter("a", made)


def parts_of(sites):
    return [(site, part) for site in sites.all for part in site.parts]


def delta(packed, site, part, x):
    """What a rank adds for inputs x [n, whole size]: of its inputs, to its outputs."""
    (at,) = (pair for pair in packed.pairs if pair.row == part.row)
    a = packed.values[at.a :][: at.rank * part.input_size]
    a = a.view(-1, at.rank) if site.kind is Kind.EMBEDDING else a.view(at.rank, -1).T
    b = packed.values[at.b :][: at.rank * part.output_size].view(at.rank, -1)
    own = x.new_zeros(len(x), part.input_size)
    own[:, : part.inputs.size] = x[:, part.inputs.place]
    return as_stored(part, at.scale * own @ a @ b)


def as_stored(part, outputs):
    """The columns of a part's outputs in the order of the checkpoint."""
    stored = outputs.clone()
    if part.order:
        assert list(part.order) != sorted(part.order) or part.name == "paired_v"
        stored[:, list(part.order)] = outputs
    return stored


@pytest.mark.parametrize("world", WORLDS)
def test_the_ranks_together_add_what_the_whole_adapter_adds(world):
    adapter, ranks = whole_adapter(), ranks_of(world)
    packed = [pack(adapter, sites.all, torch.float64) for sites in ranks]
    assert len({len(one.values) for one in packed}) == 1  # a place in one pool is that in all
    for index, (site, part) in enumerate(parts_of(ranks[0])):
        if part.row not in adapter.pairs:
            assert all(pair.row != part.row for one in packed for pair in one.pairs)
            continue
        whole = adapter.pairs[part.row]
        x = torch.randn(7, part.whole_size[1]).double()
        want = whole.scale * x @ whole.a.T @ whole.b.T
        own = [parts_of(sites)[index][1] for sites in ranks]
        added = [delta(one, site, part, x) for one, part in zip(packed, own, strict=True)]
        if own[0].inputs.size < own[0].inputs.whole:
            torch.testing.assert_close(sum(added), want)
            continue
        seen = set()
        for part, got in zip(own, added, strict=True):
            for share, run in zip(
                part.outputs, got.split([one.room for one in part.outputs], 1), strict=True
            ):
                torch.testing.assert_close(run[:, : share.size], want[:, share.place])
                assert not run[:, share.size :].any()
                seen.update(range(share.start, share.start + share.size))
        assert seen == {*range(want.shape[1])}


class Stored(NamedTuple):
    """A slice of a file, as safetensors gives it."""

    tensor: torch.Tensor

    def get_shape(self):
        return list(self.tensor.shape)

    def __getitem__(self, rows):
        return self.tensor[rows]


def shares_of(site, part):
    """The runs of rows of a part that a rank has, and their columns."""
    if site.kind is Kind.EMBEDDING:
        return [part.inputs], part.outputs[0]
    return part.outputs, part.inputs


@pytest.mark.parametrize("world", WORLDS)
def test_a_changed_base_weight_is_found_by_the_ranks_that_have_it(world, monkeypatch):
    """By all of the ranks that share a KV head, or have a layer whole; else by one rank."""
    monkeypatch.setattr(base_weights, "_CHUNK", 11)  # elements: some rows at once
    ranks, wholes = ranks_of(world), {}
    for sites in ranks:
        for site, part in parts_of(sites):
            outputs, inputs = part.whole_size
            size = (inputs, outputs) if site.kind is Kind.EMBEDDING else (outputs, inputs)
            whole = wholes.setdefault(part.row, torch.randn(size))
            runs, columns = shares_of(site, part)
            assert isinstance(site.weight, DenseWeight)
            start = part.output_start
            if part.order:
                start, values = 0, site.weight.values[start : start + part.output_size]
                (run,) = runs
                values.copy_(whole[run.place][list(part.order)])
                continue
            for run in runs:
                own = site.weight.values[start : start + run.size, : columns.size]
                own.copy_(whole[run.place, columns.place])
                start += run.room
    for site, part in parts_of(ranks[0]):
        good = wholes[part.row]
        for row in {0, len(good) // 2, len(good) - 1}:
            changed, found = good.clone(), []
            changed[row, -1] += 1
            for sites in ranks:
                site, own = parts_of(sites)[part.row]
                assert first_difference(site, own, Stored(good)) is None
                runs, columns = shares_of(site, own)
                has = any(run.start <= row < run.start + run.size for run in runs)
                has &= columns.start + columns.size == columns.whole
                found.append(first_difference(site, own, Stored(changed)))
                assert found[-1] == (row if has else None)
            assert row in found
