"""A request's bits do not depend on the rest of its batch, nor on the launch configuration."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from depth import at_depth

from kiln.jit_kernels.check import invariance
from kiln.jit_kernels.check.invariance import attention_trials
from kiln.jit_kernels.ops.attention.cases import make_case
from kiln.jit_kernels.ops.attention_decode.splits import Part, SplitRule

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(at_depth(1, 4)))
def test_attention_of_a_request_is_the_same_in_any_batch(seed):
    assert attention_trials(CPU, at_depth(15, 50), seed, longest=300) == []


def test_so_is_one_whose_splits_are_added_up_by_four_blocks_or_two_or_one(monkeypatch):
    kinds, launch = [], invariance._launch

    def spy(name, arguments, how):
        launch(name, arguments, how)
        if name == "attention_plan":
            items = arguments["items"]
            kinds.append({Part(place >> 29) for place in items[1 : 1 + items[0, 0], 4].tolist()})

    monkeypatch.setattr(invariance, "_launch", spy)
    requests = [(700 + 60 * i, 1) for i in range(5)]
    sizes = {"kv_heads": 2, "group": 3, "steep": 6}
    case = make_case(sizes, torch.bfloat16, torch.bfloat16, 64, "cpu", requests=requests)
    rule, bits = SplitRule(8, 64, 2), []
    for order in ([3], [1, 3], [3, 0, 2], [4, 3, 2, 1, 0]):
        how = invariance._Launch(blocks=2 * (6 - len(order)), seed=len(order))
        bits.append(invariance._rows(case, order, rule, how)[3])
    assert kinds == [{Part.QUARTER}, {Part.QUARTER}, {Part.HALF}, {Part.SPLIT_IN_UNITS}]
    assert all(torch.equal(one, bits[0]) for one in bits)


def test_a_split_that_looks_at_the_batch_is_found(monkeypatch):
    run = invariance._run

    def by_batch(case, rule, how):  # what other engines do: fewer splits where there are more rows
        return run(case, replace(rule, blocks=1 + len(case.seq_lens)), how)

    monkeypatch.setattr(invariance, "_run", by_batch)
    # Rounded to bf16, few trials may agree by chance; how many depends on torch and the processor.
    trials = (attention_trials(CPU, 12, seed, longest=300) for seed in range(10))
    failures = next(filter(None, trials), [])
    assert failures
    assert failures[0].startswith("batch ")


def test_every_trial_compares_each_request_alone(monkeypatch):
    seen = []
    rows = invariance._rows

    def spy(case, order, rule, how):
        seen.append(order)
        return rows(case, order, rule, how)

    monkeypatch.setattr(invariance, "_rows", spy)
    assert not invariance._trial(random.Random(3), CPU, 80)
    whole = seen[0]
    assert all([request] in seen for request in whole)
    assert len(seen) == len(whole) + 3
