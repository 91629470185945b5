"""The serving benchmark: one load at several rates or concurrencies, on one server after another.

Nothing here runs torch before the load ends: the server needs every core.
"""

from __future__ import annotations

import random
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kiln.engine.bench.arrivals import Arrivals
from kiln.engine.bench.datasets import Dataset, Sample
from kiln.engine.bench.http_get import get_json
from kiln.engine.bench.load_client import LoadError, Target, run_load
from kiln.engine.bench.load_metrics import summarise
from kiln.engine.bench.report import Row

_WARM_UP_TOKENS = 16
_WARM_UP_STREAMS = 16
_CHANCE = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Point:
    """One run of the load: when requests are sent, and how many."""

    arrivals: Arrivals
    num_prompts: int


@dataclass(frozen=True, slots=True)
class Load:
    """What every server gets.

    ``percentiles`` are those of every latency. ``goals``: see ``summarise``. Each point has
    requests of its own, and the seed fixes them all. ``text_of`` makes the text of a chat of token
    ids.
    """

    dataset: Dataset
    points: Sequence[Point]
    seed: int = 0
    percentiles: Sequence[float] = (99,)
    goals: Mapping[str, float] = field(default_factory=dict)
    text_of: Callable[[list[int]], str] | None = None

    def samples(self, index: int) -> list[Sample]:
        """Return the requests of a point; those of the warm-up for index -1."""
        seeds = random.Random(self.seed)
        seed = [seeds.randrange(1 << 32) for _ in range(index + 2)][-1]
        if index >= 0:
            return self.dataset.draw(self.points[index].num_prompts, seed)
        drawn = self.dataset.draw(min(_WARM_UP_STREAMS, self.points[0].num_prompts), seed)
        return [
            replace(one, output_tokens=min(_WARM_UP_TOKENS, one.output_tokens)) for one in drawn
        ]

    def bodies(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Return greedy requests with exactly as many output tokens as their samples have."""
        fixed = {"temperature": 0, "ignore_eos": True}
        return [
            {**self._prompt(one.prompt), "max_tokens": one.output_tokens, **fixed}
            for one in samples
        ]

    def _prompt(self, prompt: list[int] | str) -> dict[str, Any]:
        if self.text_of is None:
            return {"prompt": prompt}
        text = prompt if isinstance(prompt, str) else self.text_of(prompt)
        return {"messages": [{"role": "user", "content": text}]}


@dataclass(frozen=True, slots=True)
class Shown:
    """What is told while a load runs: ``begin`` what, of how many requests; ``advance`` by one."""

    begin: Callable[[str, int], None] = lambda what, total: None
    advance: Callable[[], None] = lambda: None


def random_seed() -> int:
    """Return a seed whose prompts a running server has not cached from an earlier benchmark."""
    return _CHANCE.randrange(1 << 32)


def measure(name: str, target: Target, load: Load, shown: Shown | None = None) -> Iterator[Row]:
    """Warm a server up, and yield a row for each point of the load.

    Failed requests are counted in the row. Raises LoadError if all requests of the warm-up fail.
    """
    shown = shown or Shown()
    _warm_up(name, target, load, shown)
    for index, point in enumerate(load.points):
        samples = load.samples(index)
        shown.begin(f"{name}: {point.arrivals}", len(samples))
        seconds, answers = run_load(target, load.bodies(samples), point.arrivals, shown.advance)
        for sample, answer in zip(samples, answers, strict=True):
            if not answer.error and answer.output_tokens != sample.output_tokens:
                made, asked = answer.output_tokens, sample.output_tokens
                answer.error = f"wrong number of output tokens, such as {made} instead of {asked}"
        yield {
            "engine": name,
            "load": str(point.arrivals),
            "max_concurrency": point.arrivals.concurrency,
            "request_rate": point.arrivals.rate,
            **summarise(seconds, answers, load.percentiles, load.goals),
        }


def _warm_up(name: str, target: Target, load: Load, shown: Shown) -> None:
    bodies = load.bodies(load.samples(-1))
    shown.begin(f"{name}: warm-up", len(bodies))
    _, answers = run_load(target, bodies, Arrivals(len(bodies)), shown.advance)
    if all(answer.error for answer in answers):
        raise LoadError(f"{name}, {target.url}: every request failed: {answers[0].error}")


def served_model(url: str, api_key: str | None) -> str:
    """Return the name of a server's first model. Raises LoadError."""
    try:
        return str(get_json(f"{url}/v1/models", api_key)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        raise LoadError(f"{url}/v1/models: {error.code} {error.reason}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise LoadError(f"{url}/v1/models does not name a model: {error}") from error
