"""Clients that ask without pause, and what became of each request."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

_PAUSE_SECONDS = 0.05  # after a request that failed
_TIMEOUT_SECONDS = 60.0


@dataclass
class Answer:
    """One request. ``outcome`` is "ok", or what went wrong; times are of ``time.monotonic``."""

    began: float
    ended: float
    outcome: str
    replica: str | None


@dataclass
class Load:
    """The answers so far, of a load that runs until ``wait`` returns."""

    answers: list[Answer] = field(default_factory=list)
    is_stopped: bool = False
    _thread: threading.Thread | None = None

    @property
    def bad(self) -> list[Answer]:
        """The requests without a whole answer."""
        return [one for one in self.answers if one.outcome != "ok"]

    def kinds(self) -> dict[str, int]:
        """Return how many requests went wrong in which way."""
        return dict(Counter(one.outcome for one in self.bad))

    def in_flight(self, moment: float) -> int:
        """Return how many requests were in flight at a moment."""
        return sum(one.began <= moment < one.ended for one in self.answers)

    def longest_pause(self, moment: float) -> float:
        """Return the longest time without a whole answer after a moment."""
        ends = sorted(one.ended for one in self.answers if one.outcome == "ok")
        ends = [moment, *(end for end in ends if end > moment)]
        return max((later - earlier for earlier, later in itertools.pairwise(ends)), default=0.0)

    def wait_for(self, number: int) -> None:
        """Return when so many requests have ended."""
        while len(self.answers) < number:
            time.sleep(0.01)

    def stop(self) -> None:
        """Let no client ask again."""
        self.is_stopped = True

    def wait(self) -> None:
        """Return when all requests have ended."""
        assert self._thread is not None
        self._thread.join()


@contextmanager
def load(url: str, clients: int, requests: int, max_tokens: int = 8) -> Iterator[Load]:
    """Let clients ask until so many answers are whole; each prompt is new, half are streams."""
    made = Load()
    numbers = itertools.count()

    async def client(http: httpx.AsyncClient) -> None:
        while len(made.answers) - len(made.bad) < requests and not made.is_stopped:
            number = next(numbers)
            answer = await _ask(http, url, number, max_tokens)
            made.answers.append(answer)
            if answer.outcome != "ok":
                await asyncio.sleep(_PAUSE_SECONDS)

    async def all_clients() -> None:
        limits = httpx.Limits(max_keepalive_connections=0)  # no connection that is half closed
        async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, limits=limits) as http:
            await asyncio.gather(*(client(http) for _ in range(clients)))

    made._thread = threading.Thread(target=lambda: asyncio.run(all_clients()), daemon=True)
    made._thread.start()
    yield made
    made.wait()


async def _ask(http: httpx.AsyncClient, url: str, number: int, max_tokens: int) -> Answer:
    """Ask once; half of the requests are streams."""
    body = {
        "messages": [{"role": "user", "content": f"What is {number} + {number + 1}?"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": number % 2 == 0,
    }
    began, replica = time.monotonic(), None
    try:
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            replica = response.headers.get("x-kiln-replica")
            text = (await response.aread()).decode()
            outcome = _outcome(response, text, body["stream"])
    except httpx.HTTPError as error:
        outcome = type(error).__name__
    return Answer(began, time.monotonic(), outcome, replica)


def _outcome(response: httpx.Response, text: str, is_stream: Any) -> str:
    """Return "ok" for a whole answer. Errors must have OpenAI's form."""
    if response.status_code != 200:
        return f"{response.status_code} {json.loads(text)['error']['code']}"
    if not is_stream:
        return "ok" if json.loads(text)["choices"] else "empty"
    events = [line[6:] for line in text.splitlines() if line]
    if events[-1:] != ["[DONE]"]:
        return "cut off"
    error = json.loads(events[-2]).get("error")
    return "ok" if error is None else f"stream {error['code']}"
