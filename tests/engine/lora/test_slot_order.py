"""Under priority scheduling adapters get their slots in the order of the requests that wait."""

from __future__ import annotations

import random

import pytest
from depth import at_depth

from kiln.engine.config import SchedulerConfig
from kiln.engine.kv.block_pool import BlockPool
from kiln.engine.kv.manager import KVManager
from kiln.engine.lora.loaded_adapter import Copied
from kiln.engine.lora.room import Drain
from kiln.engine.lora.slots import AdapterSlots
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.requests.waiting import PriorityQueue
from kiln.engine.scheduler import Scheduler

PATIENCE = 5.0


class Device:
    """Copies adapters; ``slots`` says which are there, ``delay`` how many passes a copy takes."""

    def __init__(self, num_slots, delay):
        self.num_slots = self.size = num_slots
        self.slots, self.copies, self.delay = {}, [], delay

    def begin(self, name, slot, start):
        self.copies.append([self.delay(), name, slot])

    def copied(self, *, wait=False):
        done = []
        for copy in list(self.copies):
            copy[0] = 0 if wait else copy[0] - 1
            if copy[0] <= 0:
                self.copies.remove(copy)
                self.slots[copy[2]] = copy[1]
                done.append(Copied(copy[1]))
        return done

    def clear(self, slot):
        self.copies = [copy for copy in self.copies if copy[2] != slot]
        self.slots.pop(slot, None)


class Run:
    """A scheduler over adapters of one element each; a second passes in every step.

    So many steps are in flight while the next one is scheduled as ``ahead`` says.
    """

    ahead = 0

    def __init__(self, runner, names, num_slots, *, delay=lambda: 0, policy="priority", **config):
        self.now, self.runner, self.device = 0.0, runner, Device(num_slots, delay)
        clock = self._clock
        self.slots = AdapterSlots(self.device, patience=PATIENCE, clock=clock)
        for name in names:
            self.slots.add(name, 1, pinned=False)
        limits = SchedulerConfig(scheduling_policy=policy, **config)
        self.scheduler = Scheduler(
            limits.for_device("cpu"),
            KVManager(BlockPool(runner.num_blocks), runner.block_size),
            max_model_len=runner.max_model_len,
            adapters=self.slots,
        )
        if policy == "priority":
            self.scheduler.waiting = PriorityQueue(clock)
        self.begun, self.tokens, self.adapters, self.launched = {}, {}, {}, []

    def _clock(self):
        return self.now

    def add(self, name, adapter=None, priority=0, max_tokens=4):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        self.adapters[name] = adapter
        self.scheduler.add(NewRequest(name, [1, 2], params, adapter, priority=priority))

    def step(self):
        self.now += 1
        batch = self.scheduler.schedule()
        if not batch.requests and not self.launched:
            self.slots.collect(wait=True)
        for row in batch.requests:
            self.begun.setdefault(row.request_id, self.now)
            assert self.device.slots.get(row.adapter_slot) == self.adapters[row.request_id]
        if batch.requests:
            self.launched.append((batch, self.runner.run(batch)))
        while len(self.launched) > (self.ahead if batch.requests else 0):
            for output in self.scheduler.commit(*self.launched.pop(0)):
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)

    def finish(self):
        for _ in range(3000):
            if not self.scheduler.has_work and not self.launched:
                return
            self.step()
        raise AssertionError("does not end")


def test_of_two_that_wait_for_a_slot_the_lower_priority_gets_it(fake_runner):
    for policy, first in (("priority", "good"), ("fcfs", "poor")):
        run = Run(fake_runner(), "abc", 1, policy=policy)
        run.add("a", "a", max_tokens=20)
        run.step()
        run.add("poor", "b", 1 if policy == "priority" else 0)
        for _ in range(8):  # a drain for poor has begun
            run.step()
        run.add("good", "c")
        run.finish()
        assert min(("poor", "good"), key=run.begun.__getitem__) == first


def test_a_slot_goes_to_the_first_that_waits_even_if_another_has_waited_longer(fake_runner):
    run = Run(fake_runner(), "abc", 1)
    for number in range(3):  # a is always wanted
        run.add(f"a-{number}", "a", max_tokens=10 + number)
    run.step()
    run.add("poor", "b", 2)
    run.step()
    run.add("good", "c", 1)
    for number in range(3, 60):
        run.add(f"a-{number}", "a", 2)
        run.step()
        if "good" in run.begun:
            break
    assert "poor" not in run.begun
    run.finish()


def test_a_drain_for_a_poor_request_holds_up_no_better_one(fake_runner):
    """The poor one is far from its turn: better ones take all rows."""
    run = Run(fake_runner(256), "ab", 1, max_num_seqs=2)
    run.add("a-first", "a", max_tokens=3)
    run.add("base-first", max_tokens=3)
    run.step()
    run.add("poor", "b", 3)
    for _ in range(8):
        run.add(f"base-{run.now}", max_tokens=1)
        run.add(f"base-{run.now}-too", max_tokens=1)
        run.step()
    for number in range(60):
        run.add(f"a-{number}", "a", max_tokens=1)
        run.add(f"base-again-{number}", max_tokens=1)
        run.step()
    waits = [run.begun[f"a-{number}"] - 9 - number for number in range(40)]
    assert max(waits) <= 2 + PATIENCE + 8
    for number in range(60, 200):
        run.add(f"a-{number}", "a", max_tokens=1)
        run.step()
        if "poor" in run.begun:
            break
    assert run.now > 60, "better ones came first"
    assert run.begun["poor"] <= 2 + 90 + 2 * PATIENCE + 10, "and then its wait counted"
    run.finish()


@pytest.mark.parametrize(
    ("seen", "overtaken"),
    [
        ({}, False),
        ({"a": True, "own": False, "b": False}, False),
        ({"a": True, "own": True, "b": False}, False),
        ({"a": False, "own": False}, True),
        ({"a": True, "b": False}, True),
    ],
)
def test_a_drain_is_overtaken_by_who_waits_before_its_own_requests(seen, overtaken):
    assert Drain("own", frozenset()).is_overtaken(seen) == overtaken


@pytest.mark.quick(10)
@pytest.mark.parametrize("seed", range(at_depth(20, 200)))
def test_random_priorities_and_adapters_all_end(fake_runner, seed):
    chance = random.Random(seed)
    names = "abcd"[: chance.randint(2, 4)]
    run = Run(
        fake_runner(chance.randint(8, 30)),
        names,
        chance.randint(1, 2),
        delay=lambda: chance.randint(0, 3),
        max_num_seqs=chance.randint(1, 4),
        max_num_batched_tokens=chance.randint(4, 20),
    )
    run.ahead = seed % 2
    wanted = {}
    for number in range(50):
        name = f"r{number}"
        wanted[name] = chance.randint(1, 12)
        adapter = chance.choice([None, *names])
        run.add(name, adapter, chance.randint(-1, 2), max_tokens=wanted[name])
        run.step()
    run.finish()
    assert {name: len(tokens) for name, tokens in run.tokens.items()} == wanted
    assert all(one.requests == one.running == 0 for one in run.slots.loaded)


def test_every_adapter_gets_its_turn_though_better_ones_keep_coming(fake_runner):
    run = Run(fake_runner(256), "abc", 1, max_num_seqs=4)
    run.add("poor", "c", 2)
    for number in range(200):
        for name in "ab":
            run.add(f"{name}-{number}", name, max_tokens=3)
        run.step()
        if "poor" in run.begun:
            break
    assert 40 < run.begun["poor"] < 120
    run.finish()
