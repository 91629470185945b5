"""Adapter slots: what is evicted and when, who waits, and that a drain ends."""

from __future__ import annotations

import random

import pytest

from kiln.engine.config import SchedulerConfig
from kiln.engine.errors import AdapterBusyError, AdapterError, AdapterNotFoundError
from kiln.engine.kv.block_pool import BlockPool
from kiln.engine.kv.manager import KVManager
from kiln.engine.lora.loaded_adapter import Copied, Span
from kiln.engine.lora.room import gaps
from kiln.engine.lora.slots import AdapterSlots
from kiln.engine.requests.begin import begin_request
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.scheduler import Scheduler


class Device:
    """A pool whose elements say whose they are; each read checks them."""

    def __init__(self, num_slots, size, delay=lambda: 0):
        self.num_slots, self.size = num_slots, size
        self.values = [None] * size
        self.slots = {}  # slot to (name, start)
        self.copies = []
        self.delay = delay
        self.fails = lambda name: False
        self.sizes = {}
        self.reading = []  # spans that launched steps read

    def begin(self, name, slot, start):
        own = Span(start, self.sizes[name])
        assert own.end <= len(self.values)
        assert not any(own.overlaps(span) for span in self.reading), "a launched step reads it"
        self.values[start : own.end] = [f"part of {name}"] * own.size
        self.copies.append([self.delay(), name, slot, start])

    def copied(self, *, wait=False):
        done = []
        for copy in list(self.copies):
            copy[0] = 0 if wait else copy[0] - 1
            if copy[0] <= 0:
                _, name, slot, start = copy
                self.copies.remove(copy)
                if self.fails(name):
                    done.append(Copied(name, AdapterError(f"LoRA adapter {name!r}: no memory")))
                    continue
                self.values[start : start + self.sizes[name]] = [name] * self.sizes[name]
                self.slots[slot] = (name, start)
                done.append(Copied(name))
        return done

    def clear(self, slot):
        self.copies = [copy for copy in self.copies if copy[2] != slot]
        self.slots.pop(slot, None)

    def read(self, slot):
        name, start = self.slots[slot]
        span = Span(start, self.sizes[name])
        assert self.values[start : span.end] == [name] * span.size
        return name, span


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(sizes, num_slots, size, *, pinned=(), patience=5.0, delay=lambda: 0):
    device, clock = Device(num_slots, size, delay), Clock()
    device.sizes = dict(sizes)
    slots = AdapterSlots(device, patience=patience, clock=clock)
    for name in sizes:
        slots.add(name, sizes[name], name in pinned)
    return slots, device, clock


def ask(slots, *names, in_flight=frozenset()):
    slots.in_flight = lambda: in_flight
    slots.begin_pass()
    found = [slots.slot_for(name) for name in names]
    slots.end_pass()
    return found


def where(slots):
    return {one.name: one.slot for one in slots.loaded if one.slot >= 0}


def test_spans():
    taken = [Span(2, 3), Span(8, 1)]
    assert list(gaps(taken, 10)) == [(0, 2), (5, 3), (9, 1)]
    assert list(gaps([Span(0, 10)], 10)) == []


def test_the_least_recently_used_idle_adapter_is_evicted():
    slots, _, _ = make(dict.fromkeys("abcd", 2), 3, 6)
    assert ask(slots, "a", "b", "c") == [0, 1, 2]
    assert ask(slots, "b") == [1]
    assert ask(slots, "a") == [0]
    assert ask(slots, "d") == [2]
    assert slots.num_evictions == 1
    assert ask(slots, "c") == [1]
    assert where(slots) == {"a": 0, "c": 1, "d": 2}


def test_what_a_launched_step_or_a_running_request_uses_stays():
    slots, _, _ = make(dict.fromkeys("abc", 1), 2, 2)
    for name in "ab":
        slots.hold(name)
    assert ask(slots, "a", "b") == [0, 1]
    slots.start("a")
    assert ask(slots, "c", in_flight={1}) == [None]
    assert ask(slots, "c", in_flight={-1}) == [1]
    assert where(slots) == {"a": 0, "c": 1}
    assert ask(slots, "b", in_flight={1}) == [None]


def test_adapters_whose_memory_is_not_in_the_way_are_spared():
    slots, _, _ = make({"a": 1, "b": 1, "c": 3, "d": 3}, 4, 6)
    ask(slots, "a", "b", "c")
    assert ask(slots, "d") == [2]
    assert where(slots) == {"a": 0, "b": 1, "d": 2}, "a and b are older, but free no room"


def test_an_adapter_is_not_used_before_its_copy_has_ended():
    slots, device, _ = make({"a": 1}, 1, 1, delay=lambda: 3)
    assert ask(slots, "a") == [None]
    assert ask(slots, "a") == [None]
    assert len(device.copies) == 1
    assert ask(slots, "a") == [0]


def test_an_adapter_that_could_never_run_is_refused():
    slots, device, _ = make({"p": 2, "a": 3}, 3, 6, pinned="p")
    device.sizes |= {"b": 5, "q": 2, "c": 4, "r": 1}
    with pytest.raises(AdapterError, match=r"takes 5 numbers.* has 4 of 6 in one piece"):
        slots.add("b", 5, pinned=False)
    with pytest.raises(AdapterError, match="pinned, it leaves no room"):
        slots.add("q", 2, pinned=True)
    slots.add("r", 1, pinned=True)
    with pytest.raises(AdapterError, match="pinned, it leaves no room"):
        slots.add("s", 1, pinned=True)  # the slot of the others
    with pytest.raises(AdapterError):
        slots.add("c", 4, pinned=False)
    assert set(where(slots)) == {"p", "r"}


def test_a_pinned_adapter_waits_for_no_one_and_is_never_evicted():
    slots, device, _ = make(dict.fromkeys("abc", 2), 2, 4)
    device.sizes["p"] = 1
    slots.hold("a")
    ask(slots, "a", "b")
    slots.start("a")
    with pytest.raises(AdapterBusyError, match="in use: try again"):
        slots.add("p", 1, pinned=True)
    slots.stop("a")
    slots.add("p", 1, pinned=True)
    for name in "abcabc":
        assert ask(slots, name) == [1]
        assert ask(slots, "p") == [0]


def test_an_unloaded_adapter_frees_everything_but_not_while_it_is_used():
    slots, _, _ = make({"a": 4}, 1, 4)
    slots.hold("a")
    ask(slots, "a")
    assert not slots.remove("a")
    slots.drop("a")
    slots.in_flight = lambda: {0}
    assert not slots.remove("a")
    slots.in_flight = frozenset
    assert slots.remove("a")
    with pytest.raises(AdapterNotFoundError, match="not loaded; loaded: none"):
        slots.get("a")
    assert slots.loaded == []


def test_an_adapter_whose_request_just_ended_was_used_last():
    slots, _, _ = make(dict.fromkeys("abc", 1), 2, 2)
    for name in "ab":
        slots.hold(name)
    assert ask(slots, "a", "b") == [0, 1]
    slots.start("a")
    slots.start("b")
    slots.stop("b")
    for _ in range(5):
        ask(slots)
    slots.stop("a")
    assert ask(slots, "c") == [1]
    assert where(slots) == {"a": 0, "c": 1}


def test_a_drain_takes_the_adapter_with_the_fewest_running_requests():
    slots, _, clock = make(dict.fromkeys("abc", 1), 2, 2, patience=5)
    for name in "aabbbc":
        slots.hold(name)
    assert ask(slots, "a", "b") == [0, 1]
    for name in "abb":
        slots.start(name)
    assert ask(slots, "c") == [None]
    clock.now = 5
    assert ask(slots, "c") == [None]
    assert ask(slots, "a", "b", "c") == [None, 1, None]
    slots.stop("a")
    assert ask(slots, "b", "c") == [1, 0]


def test_a_failed_copy_frees_the_place_and_fails_those_who_wait_for_it():
    slots, device, _ = make(dict.fromkeys("ab", 1), 1, 1)
    device.fails = lambda name: name == "a"
    waiting = [
        begin_request(
            NewRequest(f"{name}-{index}", [1], SamplingParams(), name),
            0,
            9,
            frozenset(),
            is_late=False,
        )
        for index, name in enumerate(["a", None, "a", "b"])
    ]
    for request in waiting:
        if request.adapter:
            slots.hold(request.adapter)
    assert ask(slots, "a", "a", "b") == [None, None, 0], "its place is free at once"
    failed = slots.fail_waiting(waiting)
    assert [(out.request_id, out.finish_reason) for out in failed] == [
        ("a-0", "error"),
        ("a-2", "error"),
    ]
    assert {out.message for out in failed} == {"LoRA adapter 'a': no memory"}
    assert slots.fail_waiting(waiting) == [], "each is told once"
    for _ in failed:
        slots.drop("a")
    device.fails = lambda name: False
    slots.hold("a")
    assert ask(slots, "a") == [0]


def test_a_copy_that_failed_while_nobody_waited_fails_no_later_request():
    slots, device, _ = make({"a": 1, "b": 1}, 2, 2, delay=lambda: 2)
    device.fails = lambda name: True
    slots.hold("a")
    ask(slots, "a")
    slots.drop("a")
    slots.collect(wait=True)
    device.fails, device.delay = lambda name: False, lambda: 0
    slots.hold("a")
    assert ask(slots, "a") == [0]


def test_a_pinned_adapter_whose_copy_fails_keeps_its_place_and_is_copied_again():
    slots, device, _ = make({"a": 2, "b": 2}, 2, 4)
    device.sizes["p"], device.fails = 1, lambda name: name == "p"
    slots.add("p", 1, pinned=True)
    slots.collect(wait=True)
    assert where(slots) == {"p": 0}
    assert ask(slots, "a", "b") == [1, 1], "the other place is theirs"
    slots.hold("p")
    assert ask(slots, "p") == [None], "it is copied again"
    assert ask(slots, "p") == [None], "its request is told before the next copy"
    assert device.copies == []
    slots.fail_waiting([])
    device.fails = lambda name: False
    assert ask(slots, "p") == [None]
    assert ask(slots, "p") == [0]
    slots.drop("p")
    device.fails = lambda name: True
    assert slots.remove("p")
    slots.add("p", 1, pinned=True)
    slots.collect(wait=True)
    assert slots.remove("p"), "a failed one is not in use"


def test_adapters_that_cannot_be_copied_before_the_first_request_stop_the_start():
    slots, device, _ = make(dict.fromkeys("ab", 1), 2, 2)
    device.fails = lambda name: name == "b"
    with pytest.raises(AdapterError, match="'b': no memory"):
        slots.place_all()


# -- with the scheduler ---------------------------------------------------------------------------


class Run:
    """A scheduler over a fake runner and a fake device, two steps in flight."""

    def __init__(self, runner, slots, device, clock, **config):
        self.runner, self.slots, self.device, self.clock = runner, slots, device, clock
        self.scheduler = Scheduler(
            SchedulerConfig(**config).for_device("cpu"),
            KVManager(BlockPool(runner.num_blocks), runner.block_size),
            max_model_len=runner.max_model_len,
            adapters=slots,
        )
        self.launched, self.tokens, self.ended, self.begun = [], {}, {}, {}
        self.failed = {}  # messages

    def add(self, request_id, adapter, prompt=(1, 2), **params):
        own = {"temperature": 0, "ignore_eos": True, "max_tokens": 4, **params}
        new = NewRequest(request_id, list(prompt), SamplingParams(**own), adapter)
        self.scheduler.add(new)

    def step(self):
        """Launch a step behind the last one, and commit that."""
        self.clock.now += 1
        batch = self.scheduler.schedule()
        for out in self.slots.fail_waiting(self.scheduler.waiting):
            self.scheduler.abort(out.request_id)
            self.failed[out.request_id] = out.message
        if batch.requests:
            spans = []
            for row in batch.requests:
                self.begun.setdefault(row.request_id, self.clock.now)
                adapter = row.request_id.partition("-")[0]
                if adapter == "base":
                    assert row.adapter_slot == -1
                else:
                    name, span = self.device.read(row.adapter_slot)
                    assert name == adapter
                    spans.append(span)
            used = {row.adapter_slot for row in batch.requests} - {-1}
            assert len(used) <= self.device.num_slots
            self.launched.append((batch, self.runner.run(batch), spans))
        self.device.reading = [span for *_, spans in self.launched for span in spans]
        if len(self.launched) > (1 if batch.requests else 0):
            batch, output, _ = self.launched[0]
            for out in self.scheduler.commit(batch, output):
                self.tokens.setdefault(out.request_id, []).extend(out.token_ids)
                if out.finish_reason:
                    self.ended[out.request_id] = self.clock.now
            self.launched.pop(0)
            self.device.reading = [span for *_, spans in self.launched for span in spans]
        elif not batch.requests:
            self.slots.collect(wait=True)

    def finish(self, limit=5000):
        while self.scheduler.has_work or self.launched:
            self.step()
            limit -= 1
            assert limit, "does not end"
        assert self.scheduler.kv.pool.num_held == 0
        assert all(one.requests == one.running == 0 for one in self.slots.loaded)


def test_one_adapter_too_many_holds_up_no_base_request(fake_runner):
    slots, device, clock = make(dict.fromkeys("abc", 1), 2, 2)
    run = Run(fake_runner(256), slots, device, clock, max_num_seqs=32)
    for index in range(6):
        run.add(f"{'abc'[index % 3]}-{index}", "abc"[index % 3], max_tokens=40)
    for index in range(12):
        run.add(f"base-{index}", None)
        run.step()
        assert f"base-{index}" in run.begun, "admitted in the very next step"
    assert not any(name.startswith("c") for name in run.begun)
    run.finish()
    assert len(run.ended) == 18


def test_who_waits_for_a_slot_is_passed_over_for_a_bounded_time(fake_runner):
    slots, device, clock = make({"a": 1, "b": 1}, 1, 1, patience=10)
    run = Run(fake_runner(256), slots, device, clock, max_num_seqs=8)
    run.add("a-0", "a")
    run.step()
    run.add("b-0", "b")
    for index in range(1, 60):  # without an end to the passing over, b would never run
        run.add(f"a-{index}", "a")
        run.step()
        if "b-0" in run.begun:
            break
    assert 10 < run.begun["b-0"] < 10 + 4 + 6, "the bound, the last of a, steps in flight"
    run.finish()
    assert len(run.ended) == index + 2


def test_two_adapters_that_are_always_wanted_take_turns_in_one_slot(fake_runner):
    """A drain ends when its adapter runs. Else nothing is admitted while more wait for it."""
    slots, device, clock = make(dict.fromkeys("ab", 1), 1, 1, patience=10)
    run = Run(fake_runner(256), slots, device, clock, max_num_seqs=4)
    for index in range(200):
        for name in "ab":
            if sum(one.adapter == name for one in run.scheduler.waiting) < 6:  # more than run
                run.add(f"{name}-{index}", name)
        run.step()
    ended = [sum(one.startswith(name) for one in run.ended) for name in "ab"]
    assert sum(ended) > 100
    assert min(ended) > 30


def test_a_drain_frees_memory_too_and_spares_whom_it_can(fake_runner):
    sizes = {"small": 1, "wide": 6, "long": 3}
    slots, device, clock = make(sizes, 3, 9, patience=5)
    run = Run(fake_runner(256), slots, device, clock, max_num_seqs=8)
    for name in ("small", "long"):
        run.add(f"{name}-0", name, max_tokens=30)
    run.add("small-1", "small", max_tokens=30)
    run.step()
    run.add("wide-0", "wide")
    for index in range(2, 40):
        run.add(f"small-{index}", "small", max_tokens=30)
        run.step()
    assert "wide-0" in run.begun
    assert all(f"small-{index}" in run.begun for index in range(2, 8)), "it stays in use"
    run.finish()


@pytest.mark.quick(30)
@pytest.mark.parametrize("seed", range(120))
def test_random_adapters_requests_aborts_and_preemptions(fake_runner, seed):
    """Each row reads its own adapter, whole; nothing is reused under a launched step; all end."""
    chance = random.Random(seed)
    names = [f"l{index}" for index in range(chance.randint(1, 6))]
    sizes = {name: chance.randint(1, 6) for name in names}
    num_slots = chance.randint(1, 4)
    size = max(sizes.values()) + chance.randint(0, 8)
    slots, device, clock = make({}, num_slots, size, patience=chance.choice([0, 3, 20]))
    device.sizes, device.delay = sizes, lambda: chance.randint(0, 4)
    failing = chance.choice([0, 0.2])
    device.fails = lambda name: chance.random() < failing
    for name in sorted(names, key=lambda name: -sizes[name]):
        try:
            slots.add(name, sizes[name], pinned=chance.random() < 0.2)
        except AdapterError:  # it does not fit beside the pinned ones
            names.remove(name)
    runner = fake_runner(chance.randint(12, 40))
    config = {"max_num_seqs": chance.randint(1, 8), "max_num_batched_tokens": chance.randint(4, 40)}
    run = Run(runner, slots, device, clock, **config)
    wanted, aborted = {}, set()
    for index in range(60):
        if chance.random() < 0.6:
            adapter = chance.choice([None, *names])
            request_id = f"{adapter or 'base'}-{index}"
            prompt = [chance.randrange(50) for _ in range(chance.randint(1, 12))]
            wanted[request_id] = (prompt, chance.randint(1, 20))
            run.add(request_id, adapter, prompt, max_tokens=wanted[request_id][1])
        if wanted and chance.random() < 0.1:
            gone = chance.choice(list(wanted))
            run.scheduler.abort(gone)
            aborted.add(gone)
        run.step()
    run.finish()
    for request_id, (prompt, count) in wanted.items():
        if request_id in run.failed:
            assert failing
            assert repr(request_id.partition("-")[0]) in run.failed[request_id]
        elif request_id not in aborted:
            assert len(run.tokens[request_id]) == count
            assert run.tokens[request_id] == alone(fake_runner, prompt, count)
    for name in names:
        assert slots.remove(name)
    assert not device.slots
    assert slots.loaded == []


def alone(fake_runner, prompt, count):
    slots, device, clock = make({}, 0, 0)
    run = Run(fake_runner(), slots, device, clock)
    run.add("base-0", None, prompt, max_tokens=count)
    run.finish()
    return run.tokens["base-0"]
