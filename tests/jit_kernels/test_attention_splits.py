"""The split rule of decode attention: splits that fill a GPU, and bounds of the workspace."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from kiln.jit_kernels.declare.spec import HOST_GPU, Gpu
from kiln.jit_kernels.ops.attention.variants import KV_BLOCK
from kiln.jit_kernels.ops.attention_decode.splits import (
    Shape,
    SplitRule,
    cut,
    halvings,
    most_items,
    most_rows,
    split_rule,
)
from kiln.jit_kernels.ops.attention_decode.workspace import make_workspace

H200 = Gpu(num_multiprocessors=132, max_shared_bytes=227 * 1024)


def test_capacities_are_never_exceeded():
    chance = random.Random(0)
    for _ in range(3000):
        rule = SplitRule(
            *(chance.choice(of) for of in ((1, 2, 5, 33, 264), (1, 4, 16), (1, 2, 99)))
        )
        group, max_blocks = chance.choice((1, 3, 4, 8, 16, 20)), chance.randint(1, 200)
        requests = [
            (chance.randint(0, max_blocks * KV_BLOCK), chance.choice((0, 1, 3, 16, 17, 40)))
            for _ in range(chance.randint(1, 9))
        ]
        window = chance.choice((0, 0, 100, -300))
        cuts = [(n, cut(rule, n, length, group, window)) for length, n in requests]
        times = halvings(rule, [one for _, one in cuts])
        parts = [one.num_splits << one.divisible * times for _, one in cuts]
        items = sum(one.num_tiles * count for (_, one), count in zip(cuts, parts, strict=True))
        rows = sum(
            n * group * count
            for (n, one), count in zip(cuts, parts, strict=True)
            if one.num_tiles and count > 1
        )
        shapes = (len(requests), sum(n for _, n in requests), max_blocks, group)
        assert items <= most_items(rule, *shapes), (rule, requests, group)
        assert rows <= most_rows(rule, *shapes), (rule, requests, group)


def test_splits_cover_a_request_once_and_in_order():
    for length in (0, 1, 16, 255, 257, 4096, 100_000):
        one = cut(SplitRule(33, 32), 1, length, 4, 0)
        bounds = [one.begin(split) for split in range(one.num_splits + 1)]
        assert bounds[0] == 0
        assert bounds[-1] == -(-length // KV_BLOCK)
        assert bounds == sorted(bounds)


def test_a_step_that_leaves_the_machine_idle_is_divided():
    rule = split_rule(Shape(128, 2), 8, H200)
    one = cut(rule, 1, 1024, 4, 0)
    assert one.divisible
    assert [halvings(rule, [one] * n) for n in (1, 4, 5, 8, 9, 16)] == [2, 2, 1, 1, 0, 0]
    longer = cut(rule, 1, 16384, 4, 0)
    assert [halvings(rule, [longer] * n) for n in (1, 2, 3, 4)] == [2, 1, 0, 0]
    assert halvings(replace(rule, warp_bits=1), [one]) == 1
    assert not cut(rule, 1, 490, 4, 0).divisible, "less than a pair of blocks a warp"
    assert not cut(rule, 3, 1024, 4, 0).divisible, "12 rows have no room for three sums"


def test_requests_of_one_length_fill_the_machine_and_short_ones_are_not_split():
    rule = split_rule(Shape(128, 2), 8, H200)
    assert Shape(128, 2).resident_blocks(H200) == 264
    assert rule.most == 32
    assert cut(rule, 1, 512, 4, 0).num_splits == 1
    lengths = [cut(rule, 1, 1024 << i, 4, 0).num_splits for i in range(8)]
    assert lengths == [2, 2, 2, 4, 8, 16, 32, 32]
    bytes_rule = split_rule(Shape(128, 1), 8, H200)
    lengths = [cut(bytes_rule, 1, 1024 << i, 4, 0).num_splits for i in range(8)]
    assert lengths == [1, 2, 2, 4, 8, 16, 32, 32], "1024 keys of bytes are not worth two splits"
    for context in (1024, 2048, 4096, 8192, 16384, 32768):
        for number in (1 << i for i in range(6) if 16384 <= context << i <= 262144):
            cuts = [cut(rule, 1, context, 4, 0)] * number
            items = sum(one.num_splits for one in cuts) << (
                halvings(rule, cuts) if cuts[0].divisible else 0
            )
            assert items % 32 == 0, (context, number, items)
    assert split_rule(Shape(128, 2), 7, H200).most == 36
    assert split_rule(Shape(64, 2), 64, HOST_GPU).most == 2, "blocks come in pairs"


def test_a_long_request_fills_the_machine_alone_and_many_are_not_cut_up_small():
    rule = split_rule(Shape(128, 2), 1, H200)  # of a GPU of eight, say, that has one KV head
    assert rule.most == 264
    longest = cut(rule, 1, 131072, 8, 0)
    assert longest.num_splits == 64
    assert [halvings(rule, [longest] * n) for n in (1, 2, 3, 4, 16)] == [2, 1, 0, 0, 0]
    assert [cut(rule, 1, 1 << 22, group, 0).num_splits for group in (1, 16)] == [256, 256]
    assert cut(rule, 1, 131072, 8, 0).divisible
    assert not cut(replace(rule, most=33, few=33), 1, 131072, 8, 0).divisible, "a split alone"


def test_what_a_block_keeps_depends_on_what_a_multiprocessor_has():
    smaller = Gpu(num_multiprocessors=108, max_shared_bytes=163 * 1024)  # an A100
    smallest = Gpu(num_multiprocessors=128, max_shared_bytes=99 * 1024)  # an RTX 4090
    shape = Shape(128, 2)
    assert [shape.resident_blocks(gpu) for gpu in (H200, smaller, smallest)] == [264, 216, 128]
    assert shape.shared_bytes(H200) > shape.shared_bytes(smaller) == shape.shared_bytes(smallest)


def test_partial_results_take_the_rows_that_are_used():
    workspace = make_workspace(
        max_requests=256, max_tokens=256, max_blocks=8192, num_heads=32, num_kv_heads=8,
        head_dim=128, kv_dtype=torch.bfloat16, device=torch.device("meta"),
        rule=split_rule(Shape(128, 2), 8, H200),
    )  # fmt: skip
    assert workspace.partials.shape == (256 * 4 * 32, 8, 128 + 8)
    assert workspace.mail.shape == (2 * 32 * 16, 8, 128 + 8)
    assert workspace.num_bytes < 155e6
