"""The queue of waiting requests, in the order of ``--scheduling-policy``, and who is preempted.

``fcfs``: first come, first served; the request that was admitted last is preempted first.

``priority``: each request has a level, which is its priority less one for each 30 s that it has
waited. A lower level comes first, and the earlier arrival on the same level:

    begins to wait    behind those that come before it at this moment
    waits             gains levels as all that wait do, so no two of them change places
    runs              keeps the levels that it has gained, and gains none
    preemption        takes the running request that comes last; it begins to wait again

So a new request overtakes one whose priority is worse by k only if that has waited for less than
k * 30 s. Because the priorities in use have a lowest one, finitely many overtake any request.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

from kiln.engine.config import SchedulingPolicy
from kiln.engine.errors import QueueFullError, RequestError
from kiln.engine.requests.request import NewRequest, Request

MAX_PRIORITY = 2**63 - 1
LEVEL_SECONDS = 30.0  # of waiting gain one level

_place = attrgetter("place")
_order = attrgetter("level", "arrival")


class ArrivalQueue(deque[Request]):
    """First come, first served."""

    by_priority = False

    def check(self, new: NewRequest) -> None:
        """Refuse a priority, which would have no effect. Raises RequestError."""
        if new.priority:
            raise RequestError(
                f"priority is {new.priority}, but priority scheduling is not enabled: start with "
                "--scheduling-policy priority, LLM with scheduling_policy='priority', or leave "
                "priority out",
                "priority",
            )

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.append(request)

    def put_back(self, request: Request) -> None:
        """Queue a preempted request. Those preempted in one step come from last to first."""
        self.appendleft(request)

    def start(self, request: Request, running: list[Request]) -> None:
        """Move a waiting request to its place in ``running``; the last one is preempted first."""
        self.remove(request)
        running.append(request)

    def rebuild(self, requests: Iterable[Request]) -> None:
        """Queue all requests anew, given in the order of arrival, after an interrupt anywhere."""
        self.clear()
        self.extend(requests)


class PriorityQueue(deque[Request]):
    """Ordered by level, then by arrival; see the docstring of this module.

    The level of a waiting request falls with time. Its place does not: the time at which it would
    reach level 0. The queue is sorted by places.
    """

    by_priority = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock

    def check(self, new: NewRequest) -> None:
        """Accept every priority."""

    def add(self, request: Request) -> None:
        """Queue a new request, behind all of its level."""
        now = self._clock()
        request.place = LEVEL_SECONDS * request.level + now
        request.waits_since = now
        self.insert(bisect_right(self, request.place, key=_place), request)

    def put_back(self, request: Request) -> None:
        """Queue a request that has run, before those of its level that arrived later."""
        now, mine = self._clock(), _order(request)
        index = 0
        while index < len(self) and (_level(self[index], now), self[index].arrival) < mine:
            index += 1
        request.place = LEVEL_SECONDS * request.level + now
        if index < len(self):  # who is behind it now stays behind it
            request.place = min(request.place, self[index].place)
        request.waits_since = now
        self.insert(index, request)

    def start(self, request: Request, running: list[Request]) -> None:
        """Move a waiting request to its place in ``running``; the last one is preempted first."""
        self.remove(request)
        request.level, request.waits_since = _level(request, self._clock()), math.inf
        insort(running, request, key=_order)

    def rebuild(self, requests: Iterable[Request]) -> None:
        """Queue all requests anew, given in the order of arrival, after an interrupt anywhere.

        Requests that waited before keep their places in the queue.
        """
        given = list(requests)
        self.clear()
        self.extend(sorted((one for one in given if one.waits_since < math.inf), key=_place))
        for one in given:
            if one.waits_since == math.inf:
                self.put_back(one)


WaitingQueue = ArrivalQueue | PriorityQueue


def check_room(waiting: WaitingQueue, most: int) -> None:
    """Refuse a new request if ``most`` are waiting. Raises QueueFullError."""
    if len(waiting) >= most:
        raise QueueFullError(
            f"{len(waiting)} requests are waiting, and the queue holds at most {most}: try again "
            "later"
        )


def waiting_queue(policy: SchedulingPolicy) -> WaitingQueue:
    """Return an empty queue with the order of a policy."""
    return PriorityQueue() if policy == "priority" else ArrivalQueue()


def _level(request: Request, now: float) -> int:
    """Return the level of a request at a time; a running one keeps its own."""
    return request.level - int(max(0.0, now - request.waits_since) // LEVEL_SECONDS)
