"""Results do not depend on which blocks merge a row's parts, nor on how they get them."""

from __future__ import annotations

import pytest
import torch

from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import HOST_GPU, Gpu
from kiln.jit_kernels.ops.attention.error import MOST_UNITS
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host

SPEC = find_spec("paged_attention")
LARGE = Gpu(num_multiprocessors=17, max_shared_bytes=HOST_GPU.max_shared_bytes)
LARGER = Gpu(num_multiprocessors=35, max_shared_bytes=HOST_GPU.max_shared_bytes)
SPLITS = {"kv_heads": 1, "group": 5, "most": 68, "split": 1, "few": 68}  # of a block each
QUARTERS = {"kv_heads": 1, "group": 2, "most": 32, "split": 32, "few": 8, "context": 4096}


def result(monkeypatch, machine, tile, sizes, seed=0, change=lambda a: None):
    """Check out and lse; return their bits and the number of work items."""
    variant = next(SPEC.variants({"scalar_t": "kiln::bf16", "head_tile": tile}))
    torch.manual_seed(0)
    a = SPEC.make_arguments(variant, sizes, "cpu")
    change(a)
    wanted = SPEC.reference(a)
    monkeypatch.setattr(host, "HOST_GPU", machine)
    host.run(SPEC, a, checked=True, seed=seed, env=settings())
    assert SPEC.error(a, wanted) <= MOST_UNITS
    return a.out.view(torch.int16), a.lse.view(torch.int32), int(a.items[0, 0])


@pytest.mark.quick(5)
@pytest.mark.parametrize("before", [0, 1], ids=["in-a-pair", "in-two-pairs"])
@pytest.mark.parametrize(
    ("tile", "parts"),
    [("64", n) for n in (2, 5, 9, 16, 17, 32, 33, 34, 64, 65, 66)] + [("256", 12), ("256", 35)],
)
def test_parts_sent_are_added_up_as_parts_written_are(monkeypatch, tile, parts, before):
    sizes = {**SPLITS, "requests": 1, "context": 16 * parts - 3}
    if before:  # another request's only part: the last two are of different clusters
        sizes["long"] = 5
    machine = LARGE if parts < 33 else LARGER
    *sent, items = result(monkeypatch, machine, tile, sizes, seed=parts)
    *written, _ = result(monkeypatch, HOST_GPU, tile, sizes)
    assert items == parts + before
    assert all(map(torch.equal, sent, written))


def test_an_infinite_value_of_the_last_part_is_infinite(monkeypatch):
    variant = next(SPEC.variants({"scalar_t": "kiln::bf16", "head_tile": "64"}))
    results = []
    for machine in (LARGE, HOST_GPU):
        torch.manual_seed(0)
        a = SPEC.make_arguments(variant, {**SPLITS, "requests": 1, "context": 48}, "cpu")
        a.value_pool[int(a.block_table[0, 2])] = float("inf")
        monkeypatch.setattr(host, "HOST_GPU", machine)
        host.run(SPEC, a, checked=True, env=settings())
        results.append(a.out)
    assert all(out.isposinf().all() for out in results)


@pytest.mark.quick(2)
@pytest.mark.parametrize("before", [0, 1], ids=["in-pairs", "across-pairs"])
@pytest.mark.parametrize(
    ("tile", "group"), [("64", 1), ("64", 2), ("64", 7), ("64", 8), ("256", 7)]
)
def test_quarters_sent_are_added_up_as_quarters_written_are(monkeypatch, tile, group, before):
    """With head_dim 256 a block has two warps: halves. Of four blocks, a cluster merges two."""
    parts, context = {"64": (4, 4096), "256": (2, 1024)}[tile]
    sizes = {**QUARTERS, "requests": 1, "steep": 6, "group": group, "most": 34}
    sizes |= {"context": context, "split": context // 128}
    if before:  # the only part of another request is first
        sizes["long"] = 5
    *sent, items = result(monkeypatch, LARGE, tile, sizes)
    *written, _ = result(monkeypatch, HOST_GPU, tile, sizes)
    *whole, splits = result(monkeypatch, HOST_GPU, tile, {**sizes, "most": 8 + before})
    assert (items, splits) == (8 * parts + before, 8 + before)
    assert all(map(torch.equal, sent, written))
    assert all(map(torch.equal, sent, whole))


def cancel(a):
    """Make the second half of a request cancel the first, so that only rounding errors remain.

    Its first key has a greater weight and a value of zero, so that the halves' maxima differ.
    """
    keys, values = a.key_pool, a.value_pool
    first, second = a.block_table[0, : int(a.seq_lens[0]) // 16].long().chunk(2)
    values[first[0], :, 0] = 0
    keys[second], values[second] = keys[first], -values[first]
    keys[second[0], :, 0] = 0.7 * a.query[0].sum(0)  # of all heads


@pytest.mark.quick(1)
@pytest.mark.parametrize(("tile", "quarters"), [("256", 32), ("64", 64)])
def test_nodes_are_of_eight_splits_however_these_are_cut(monkeypatch, tile, quarters):
    context = {"64": 8192, "256": 2048}[tile]  # of 256 columns a block has two warps: no quarters
    sizes = {**QUARTERS, "requests": 1, "context": context, "split": context // 256, "few": 16}
    runs = [
        result(monkeypatch, machine, tile, {**sizes, "most": most}, change=cancel)
        for machine in (LARGER, HOST_GPU)
        for most in (quarters, quarters // 2, 16)
    ]
    assert [items for *_, items in runs] == 2 * [quarters, quarters // 2, 16]
    for out, lse, _ in runs[1:]:
        assert torch.equal(out, runs[0][0])
        assert torch.equal(lse, runs[0][1])
