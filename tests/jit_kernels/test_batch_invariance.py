"""A request's bits do not depend on who shares its batch, nor on how the batch is launched."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kiln.jit_kernels import invariance
from kiln.jit_kernels.invariance import attention_trials

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(4))
def test_attention_of_a_request_is_the_same_in_any_batch(seed):
    assert attention_trials(CPU, 50, seed, longest=300) == []


def test_a_split_that_looks_at_the_batch_is_found(monkeypatch):
    run = invariance._run

    def by_batch(case, rule, how):  # what other engines do: fewer splits where there are more rows
        return run(case, replace(rule, blocks=1 + len(case.seq_lens)), how)

    monkeypatch.setattr(invariance, "_run", by_batch)
    failures = attention_trials(CPU, 12, 0, longest=300)
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
