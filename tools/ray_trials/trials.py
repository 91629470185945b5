"""Faults under load: what each does to clients, and when all is well again."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from ray_trials.cluster import Cluster
from ray_trials.load import load

CLIENTS = 8
_WHOLE_SECONDS = 120.0  # until two replicas answer again


@dataclass
class Trial:
    """What a fault did. Times are seconds from the fault."""

    name: str
    requests: int
    bad: int
    kinds: dict[str, int]
    in_flight: int  # of all replicas, when the fault began
    pause: float  # the longest time without a whole answer
    whole_again: float  # until two replicas answered again

    @property
    def bad_percent(self) -> float:
        """The share of requests that were bad."""
        return 100 * self.bad / self.requests

    def record(self) -> dict[str, Any]:
        """Return the fields."""
        return {**asdict(self), "bad_percent": self.bad_percent}


def strike(cluster: Cluster, name: str, requests: int, clients: int = CLIENTS) -> Trial:
    """Let a fault happen when a quarter of the requests has ended."""
    before = cluster.alive()
    restarts = cluster.restarts()
    pid, number = _victim(cluster, name, sorted(before)[0])
    with load(cluster.url, clients, requests) as made:
        made.wait_for(requests // 4)
        struck = time.monotonic()
        os.kill(pid, number)
        cluster.wait_until(lambda: _is_whole(cluster, name, before, restarts), _WHOLE_SECONDS)
        whole = time.monotonic() - struck
    return Trial(
        name,
        len(made.answers),
        len(made.bad),
        made.kinds(),
        made.in_flight(struck),
        made.longest_pause(struck),
        whole,
    )


def _victim(cluster: Cluster, name: str, replica: str) -> tuple[int, int]:
    """Return the process of a fault, and the signal for it."""
    match name:
        case "engine killed":
            return cluster.engine_of(replica), signal.SIGKILL
        case "engine stopped":
            return cluster.engine_of(replica), signal.SIGSTOP
        case "server killed":
            return cluster.server_of(replica), signal.SIGKILL
        case "front killed":
            return _working(cluster), signal.SIGKILL
    raise AssertionError(name)


def _working(cluster: Cluster) -> int:
    """Return the front that works, which has used the most time of the CPU."""

    def seconds(pid: int) -> int:
        with open(f"/proc/{pid}/stat") as stat:
            return sum(map(int, stat.read().rpartition(")")[2].split()[11:13]))

    return max(cluster.fronts(), key=seconds)


def _is_whole(cluster: Cluster, name: str, before: set[str], restarts: float) -> bool:
    """Whether two replicas answer, and what was hit has been replaced: engine, server or front."""
    try:
        alive = cluster.alive()
        is_new = name.startswith("front") or alive != before or cluster.restarts() > restarts
    except httpx.HTTPError:
        return False
    return len(alive) == 2 and is_new and len(cluster.fronts()) == 2


@dataclass
class End:
    """The end of the command with open streams."""

    streams: int
    finished: int
    exit_code: int
    seconds: float  # from the last stream's end to the command's
    left: int  # processes 2 s after the command's end

    def record(self) -> dict[str, Any]:
        """Return the fields."""
        return {"name": "SIGTERM with open streams", **asdict(self)}


def terminate(cluster: Cluster, streams: int, max_tokens: int) -> End:
    """End the command with SIGTERM while streams are open."""
    with ThreadPoolExecutor(streams) as pool:
        started = [
            pool.submit(_stream, cluster.url, number, max_tokens) for number in range(streams)
        ]
        time.sleep(1.0)  # they have begun, and take much longer
        cluster.process.send_signal(signal.SIGTERM)
        finished = sum(one.result() for one in started)
    ended = time.monotonic()
    code = cluster.process.wait(120)
    seconds = time.monotonic() - ended
    time.sleep(2.0)
    return End(streams, finished, code, seconds, len(cluster.processes()))


def _stream(url: str, number: int, max_tokens: int) -> bool:
    """Whether a stream came to its end."""
    body = {
        "messages": [{"role": "user", "content": f"What is {number} + 1?"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as response:
        *_, last, done = [line for line in response.iter_lines() if line]
    return done == "data: [DONE]" and '"finish_reason":"length"' in last
