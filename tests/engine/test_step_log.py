"""Each step leaves a record: when it ran, what it computed, and in which graph."""

from __future__ import annotations

import time

import pytest
from scripted_drafts import DeviceDrafter

from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.core import EngineCore
from kiln.engine.process.step_ring import StepRing
from kiln.engine.requests.batch import Batch, ScheduledRequest, StepOutput
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.requests.step_log import MOST_STEPS, StepLog

GREEDY = SamplingParams(temperature=0, max_tokens=3)


def make_core(runner, **scheduler):
    config = EngineConfig(
        ModelConfig("fake", seed=0), KVConfig(block_size=4), SchedulerConfig(**scheduler)
    )
    return EngineCore(config, runner=runner, eos=frozenset())


def records_of(core):
    while core.has_work:
        core.step()
    return core.step_log.take()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_record_says_what_its_step_computed(fake_runner, overlap):
    core = make_core(fake_runner(), overlap=overlap, max_num_batched_tokens=8)
    core.add(NewRequest("a", list(range(10)), GREEDY))
    before = time.monotonic()
    core.step()
    core.add(NewRequest("b", [1, 2, 3], GREEDY))
    found = records_of(core)
    seen = [(one.kind, one.requests, one.tokens, one.generated) for one in found]
    first = [("prefill", 1, 8, 0), ("prefill", 2, 5, 2), ("decode", 2, 2, 2), ("decode", 2, 2, 2)]
    assert seen == first, "the prompt of a in two parts, the second beside that of b"
    assert [one.number for one in found] == list(range(1, len(found) + 1))
    starts = [one.begun for one in found]
    assert [before, *starts] == sorted([before, *starts])
    for one in found:
        assert 0 <= one.waited <= one.seconds < time.monotonic() - before
    assert core.step_log.take() == [], "a record is taken once"


def test_a_prompt_beside_a_decode_makes_a_mixed_step(fake_runner):
    core = make_core(fake_runner(), overlap=False)
    core.add(NewRequest("a", [1, 2], GREEDY))
    core.step()
    core.add(NewRequest("b", [1, 2, 3], GREEDY))
    assert [one.kind for one in records_of(core)] == ["prefill", "mixed", "decode", "decode"]


def test_drafts_are_counted_apart_and_the_tokens_are_those_that_were_kept(fake_runner):
    runner = fake_runner()
    core = make_core(runner, overlap=False)
    core.scheduler.drafter = runner.propose = DeviceDrafter({"a": [0] * 20}, seed=0, right=0)
    core.add(NewRequest("a", [1, 2], SamplingParams(temperature=0, max_tokens=8)))
    drafted = [one for one in records_of(core) if one.drafts]
    assert drafted
    assert all(one.tokens == one.requests + one.drafts for one in drafted)
    assert all(one.generated < one.tokens for one in drafted)


def test_a_step_that_failed_says_so(fake_runner):
    runner = fake_runner()
    core = make_core(runner, overlap=False)
    core.add(NewRequest("a", [1, 2], GREEDY))
    core.add(NewRequest("b", [3, 4], GREEDY))
    runner.raise_for["b"] = RuntimeError("broken")
    first, *others = records_of(core)
    assert first.why_eager == "it failed, and its requests ran again"
    assert (first.requests, first.generated) == (2, 1)
    assert [one.why_eager for one in others] == ["", ""]


def batch_of_one():
    row = ScheduledRequest("a", 0, 1, 5, [], 2, [], 1, 3, SamplingParams(), 0)
    return Batch((row,))


def add(log, number):
    log.add(number, batch_of_one(), StepOutput((), "1"), 1, (1.0, 1.5, 2.0))


def test_only_the_last_steps_are_kept():
    log, ring = StepLog(), StepRing(most=10)
    for number in range(MOST_STEPS + 7):
        add(log, number)
    taken = log.take()
    assert [one.number for one in taken] == list(range(7, MOST_STEPS + 7))
    ring.add(taken)
    first, kept = ring.since(0)
    assert (first, ring.end) == (MOST_STEPS - 10, MOST_STEPS)
    assert [one.record for one in kept] == taken[-10:]
    assert ring.since(first + 8)[1] == kept[8:]
    for beyond in (ring.end, ring.end + 5):
        assert ring.since(beyond) == (ring.end, [])


def test_positions_go_on_when_another_engine_counts_from_the_beginning():
    """The ring outlives the client of an engine: a reader asks for what follows its last record."""
    log, ring, asked = StepLog(), StepRing(), []
    for engine, numbers in ((1, (1, 2, 3)), (2, (1, 2))):
        ring.begin_engine()
        ring.watch(asked.append)
        ring.watch(asked.append)  # it knows already
        for number in numbers:
            add(log, number)
        ring.add(log.take())
        assert len(asked) == engine
    first, steps = ring.since(2)
    assert (first, ring.end) == (2, 5)
    assert [(one.engine, one.record.number) for one in steps] == [(1, 3), (2, 1), (2, 2)]
