"""The order of waiting and of running requests under each policy, with a clock of its own."""

from __future__ import annotations

import random

import pytest
from depth import at_depth

from kiln.engine.errors import RequestError
from kiln.engine.requests.begin import begin_request
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.requests.waiting import PriorityQueue, waiting_queue


class Queue:
    """A queue by priority, and the running requests; each request has a name."""

    def __init__(self):
        self.now, self.arrivals, self.running = 100.0, 0, []
        self.waiting = PriorityQueue(clock=lambda: self.now)
        self.requests = {}

    def add(self, name, priority=0):
        new = NewRequest(name, [1], SamplingParams(), priority=priority)
        request = begin_request(new, 0, 9, frozenset())
        self.arrivals += 1
        request.arrival = self.arrivals
        self.requests[name] = request
        self.waiting.add(request)

    def start(self, name):
        self.waiting.start(self.requests[name], self.running)

    def preempt(self):
        self.running[-1].num_preemptions += 1
        self.waiting.put_back(self.running.pop())

    @property
    def order(self):
        return "".join(request.request_id for request in self.waiting)

    @property
    def run(self):
        return "".join(request.request_id for request in self.running)


@pytest.fixture
def queue():
    return Queue()


def test_a_lower_priority_comes_first_and_an_earlier_arrival_among_equals(queue):
    for name, priority in [("a", 2), ("b", 0), ("c", -1), ("d", 2), ("e", 0)]:
        queue.add(name, priority)
    assert queue.order == "cbead"


@pytest.mark.parametrize("worse", [1, 4])
def test_thirty_seconds_of_waiting_gain_a_level(queue, worse):
    queue.add("a", worse)
    queue.now += 30 * worse - 0.1
    queue.add("b")
    queue.now += 0.2
    queue.add("c")
    assert queue.order == "bac", "b came in time to overtake, c did not"


def test_priorities_may_be_any_64_bit_integers(queue):
    most = 2**63 - 1
    for name, priority in [("a", most), ("b", 1_700_000_000_001), ("c", -most), ("d", most)]:
        queue.add(name, priority)
    queue.add("e", 1_700_000_000_000)  # such as a deadline in milliseconds
    assert queue.order == "cebad"


def test_the_running_request_that_comes_last_is_the_last_of_the_list(queue):
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", 0)]:
        queue.add(name, priority)
    for name in "cadb":
        queue.start(name)
    assert queue.run == "bdac"


def test_levels_that_were_gained_by_waiting_are_kept_while_it_runs(queue):
    queue.add("a", 2)
    queue.now += 65
    queue.add("b", 0)
    for name in "ab":
        queue.start(name)
    assert queue.run == "ab", "two levels gained, and the earlier arrival"
    queue.add("c", -1)
    queue.start("c")
    assert queue.run == "cab"


def test_a_running_request_gains_no_levels(queue):
    queue.add("a", 1)
    queue.start("a")
    queue.now += 1000
    for name in "bc":
        queue.add(name)
    queue.start("b")
    assert queue.run == "ba"
    queue.preempt()
    assert queue.order == "ca", "it waits behind a better one that came while it ran"


def test_a_preempted_request_comes_before_the_others_of_its_level(queue):
    for name in "ab":
        queue.add(name)
        queue.start(name)
    queue.now += 20
    queue.add("x", -1)
    queue.add("y", 0)
    queue.add("z", 1)
    queue.now += 5
    queue.preempt()
    assert queue.order == "xbyz"
    queue.now += 0.1
    queue.preempt()
    assert queue.order == "xabyz", "of two preempted ones too the earlier arrival comes first"
    queue.add("w", 0)
    assert queue.order == "xabywz"


def test_a_preempted_request_is_overtaken_as_a_new_one_of_its_level(queue):
    queue.add("a", 1)
    queue.start("a")
    queue.now += 1000
    queue.preempt()
    queue.now += 29.9
    queue.add("b")
    queue.now += 0.2
    queue.add("c")
    assert queue.order == "bac"


def test_a_preempted_request_comes_behind_those_that_gained_a_level(queue):
    queue.add("a")
    queue.start("a")
    queue.add("b")
    queue.now += 10
    queue.add("c")
    queue.now += 25
    queue.preempt()
    assert queue.order == "bac"
    queue.start("a")
    queue.start("c")
    assert queue.run == "ac", "it has not waited for 30 s in all"


def test_equal_priorities_are_served_as_they_came(queue):
    """Until one has waited for 30 s longer than another."""
    chance = random.Random(5)
    plain, plain_running = waiting_queue("fcfs"), []
    names = iter("abcdefghijklmnopqrst")
    for _ in range(200):
        queue.now += 0.1
        act = chance.choice("asp")
        if act == "a" and (name := next(names, None)) is not None:
            queue.add(name)
            plain.add(queue.requests[name])
        elif act == "s" and plain:
            head = plain[0]
            plain.start(head, plain_running)
            queue.start(head.request_id)
        elif act == "p" and plain_running:
            plain.put_back(plain_running.pop())
            queue.preempt()
        assert list(queue.waiting) == list(plain)
        assert queue.running == plain_running


def test_no_two_that_wait_change_places_and_each_begins_behind_those_before_it():
    for seed in range(at_depth(20, 2000)):
        chance, queue = random.Random(seed), Queue()
        for number in range(60):
            before = list(queue.waiting)
            queue.now += chance.choice([0, 0.125, 7, 40])  # sums are exact
            act = chance.random()
            if act < 0.5:
                queue.add(chr(200 + number), chance.randint(-3, 3))
            elif act < 0.75 and queue.waiting:
                queue.start(chance.choice(queue.order))
            elif queue.running:
                queue.preempt()
            after = list(queue.waiting)
            stayed = [one for one in after if one in before]
            assert stayed == [one for one in before if one in after]
            places = [one.place for one in after]
            assert places == sorted(places)
            for new in set(after) - set(before):
                _check_neighbours(queue, after, new)
        assert sorted(queue.run + queue.order) == sorted(queue.requests)


def _check_neighbours(queue, after, new):
    """Who is next behind a request that begins to wait comes behind it by level and arrival.

    So does who is next ahead, unless that was preempted, and put before one that is ahead.
    """

    def order(one):
        return one.level - int((queue.now - one.waits_since) // 30), one.arrival

    at = after.index(new)
    assert all(order(one) > order(new) for one in after[at + 1 : at + 2])
    ahead = after[max(0, at - 1) : at]
    assert all(order(one) < order(new) for one in ahead if not one.num_preemptions)


def test_after_an_interrupt_all_wait_in_their_order(queue):
    for name, priority in [("a", 1), ("b", 0), ("c", 0), ("d", 2), ("e", 1)]:
        queue.add(name, priority)
        queue.now += 1
    for name in "ba":
        queue.start(name)
    assert (queue.run, queue.order) == ("ba", "ced")
    queue.now += 40
    queue.waiting.clear()  # an interrupt may leave anything
    begun = begin_request(NewRequest("f", [1], SamplingParams()), 0, 9, frozenset())
    begun.arrival = 99
    queue.waiting.rebuild([*queue.requests.values(), begun])
    assert queue.order == "cbefad", "c and e have gained a level, and f had not been queued"
    queue.waiting.rebuild([*queue.requests.values(), begun])
    assert queue.order == "cbefad"


def test_first_come_first_served_refuses_priorities_and_says_how_they_act():
    queue = waiting_queue("fcfs")
    queue.check(NewRequest("a", [1], SamplingParams()))
    with pytest.raises(RequestError, match="--scheduling-policy priority") as caught:
        queue.check(NewRequest("a", [1], SamplingParams(), priority=-1))
    assert caught.value.param == "priority"
    waiting_queue("priority").check(NewRequest("a", [1], SamplingParams(), priority=-1))
