"""Requests of a batch that have their first KV blocks in common read them together, bit for bit."""

from __future__ import annotations

import pytest
import torch
from depth import at_depth

from kiln.jit_kernels.check import invariance
from kiln.jit_kernels.ops.attention.cases import changed, make_case
from kiln.jit_kernels.ops.attention.error import MOST_UNITS, attention_error
from kiln.jit_kernels.ops.attention.reference import scattered
from kiln.jit_kernels.ops.attention_decode.splits import SplitRule, cut, groups, is_decode

RULE = SplitRule(2, 32, 2)  # two splits of a request with more than 32 blocks
UNITS = [(1030, 1), (1040, 1), (1050, 1), (0, 1), (1033, 1), (1034, 1), (1035, 1)]
THREES = [(519, 1), (540, 1), (525, 1), (514, 2), (530, 1), (535, 1), (529, 1), (541, 1)]


def case_of(requests, shared, dtype=torch.bfloat16, kv_dtype=None, **sizes):
    torch.manual_seed(3)
    sizes = {"kv_heads": 2, "group": 4, "shared": shared, "steep": 6, **sizes}
    return make_case(sizes, dtype, kv_dtype or dtype, 64, "cpu", requests=requests)


def copies_of(case):
    """Return the call with blocks of its own for each request, of the same contents."""
    keys, values, table = [], [], case.block_table.clone()
    for row, length in zip(table, case.seq_lens.tolist(), strict=True):
        count = -(-length // 16)
        keys += [case.key_pool[row[:count].long()]]
        values += [case.value_pool[row[:count].long()]]
        row[:count] = torch.arange(count) + sum(map(len, keys[:-1]))
    return changed(case, key_pool=torch.cat(keys), value_pool=torch.cat(values), block_table=table)


class Spy:
    """Keeps the plans of the launches that it passes on."""

    def __init__(self, monkeypatch):
        self.headers, self.launch = [], invariance._launch
        monkeypatch.setattr(invariance, "_launch", self)

    def __call__(self, name, named, how):
        self.launch(name, named, how)
        if name == "attention_plan":
            self.headers.append(named["items"][0, :3].tolist())


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("requests", "shared", "rule", "options"),
    [
        (UNITS, 900, RULE, {}),
        (UNITS, 512, RULE, {"group": 2, "sinks": 1, "cap": 3}),
        (THREES, 700, SplitRule(4, 8, 4), {"group": 1}),
        (UNITS, 900, RULE, {"kv_dtype": torch.float8_e4m3fn}),
        (UNITS, 900, RULE, {"dtype": torch.float16, "group": 3, "by_token": 1}),
        (UNITS, 900, RULE, {"group": 8}),
        (THREES, 700, SplitRule(20, 1, 20), {"group": 2}),
    ],
)
def test_requests_that_share_blocks_have_the_bits_of_each_alone(
    monkeypatch, requests, shared, rule, options
):
    spy, case = Spy(monkeypatch), case_of(requests, shared, **options)
    how = invariance._Launch(blocks=4, seed=1)
    everybody = list(range(len(requests)))
    together = invariance._rows(case, everybody, rule, how)
    copied = invariance._rows(copies_of(case), everybody, rule, how)
    for request in everybody:
        [alone] = invariance._rows(case, [request], rule, how).values()
        assert torch.equal(together[request], alone)
        assert torch.equal(together[request], copied[request])
    (items, rows, shares), (all_items, all_rows, none) = spy.headers[:2]
    if options.get("group") == 8:  # a tile has no room for the heads of two requests
        assert (items, shares) == (all_items, 0)
    else:
        assert shares == 1
        assert items < all_items
    assert rows == all_rows
    assert none == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_they_compute_is_attention(kv_dtype):
    case = case_of(UNITS, 1000, kv_dtype=kv_dtype, sinks=1)
    out, lse = invariance._run(case, RULE, invariance._Launch(6, 2))
    after = changed(case, out=torch.zeros_like(out), lse=lse)
    wanted = scattered(after, is_decode)
    fp16 = kv_dtype != torch.bfloat16
    units = attention_error(changed(after, out=out), wanted, is_decode, fp16_weights=fp16)
    assert units <= MOST_UNITS


def test_any_launch_has_the_same_bits(monkeypatch):
    spy, case = Spy(monkeypatch), case_of(UNITS, 1000, group=2)
    everybody = list(range(len(UNITS)))
    wanted = invariance._rows(case, everybody, RULE, invariance._Launch(2, 0))
    for blocks in at_depth((40,), (4, 6, 14, 40)):
        order = [0, invariance._PADDING, *everybody[1:]]
        rows = invariance._rows(case, order, RULE, invariance._Launch(blocks, blocks))
        assert all(torch.equal(rows[request], wanted[request]) for request in everybody)
    assert all(shares for _, _, shares in spy.headers)


def runs(lengths, shared, group=4, tokens=None, rule=RULE):
    tokens = tokens or [1] * len(lengths)
    cuts = [cut(rule, n, length, group, 0) for n, length in zip(tokens, lengths, strict=True)]
    return [len(run) for run in groups(rule, cuts, tokens, shared, group)]


def test_a_run_has_the_rows_of_half_a_tile():
    lengths, shared = [1030] * 9, [0, *[60] * 8]
    assert runs(lengths, shared, group=1) == [8, 1]
    assert runs(lengths, shared, group=2) == [4, 4, 1]
    assert runs(lengths, shared, group=3) == [2, 2, 2, 2, 1]
    assert runs(lengths, shared, group=8) == [1] * 9


def test_only_equal_splits_are_shared():
    assert runs([1030, 1030, 1030], [0, 32, 32]) == [2, 1]
    assert runs([1030, 1030, 1030], [0, 31, 31]) == [1, 1, 1], "32 blocks of the first split"
    assert runs([1030, 1130, 1030], [0, 60, 60]) == [1, 1, 1], "the splits end elsewhere"
    assert runs([1030, 1055, 1030], [0, 60, 60]) == [2, 1], "only the last one's end differs"
    assert runs([1030, 1030, 1030], [0, 60, 60], tokens=[1, 2, 1]) == [1, 1, 1]
    assert runs([500, 500, 500], [0, 30, 30]) == [1, 1, 1], "one split, which is the last"


def test_a_step_that_leaves_the_machine_idle_shares_nothing():
    rule = SplitRule(8, 32, 2)
    assert runs([1030] * 4, [0, 60, 60, 60], rule=rule) == [1] * 4
    assert runs([1030] * 5, [0, 60, 60, 60, 60], rule=rule) == [2, 2, 1]


def test_no_split_is_shared_under_a_window(monkeypatch):
    spy, case = Spy(monkeypatch), case_of(UNITS, 1000, window=1040)
    invariance._run(case, RULE, invariance._Launch(4, 0))
    assert spy.headers[0][2] == 0


def test_a_block_that_differs_in_the_middle_is_found(monkeypatch):
    spy, case = Spy(monkeypatch), case_of([(1030, 1)] * 4, 1000)
    case.block_table[1, 17] = case.block_table[1, 64]
    case.block_table[3, 0] = case.block_table[3, 64]
    invariance._run(case, RULE, invariance._Launch(4, 0))
    assert spy.headers == [[8, 32, 0]]
