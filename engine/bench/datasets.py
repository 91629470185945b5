"""The data sets of the serving benchmark, in vLLM's terms: random, prefix_repetition, sharegpt.

A seed fixes every request, so that each engine gets the same ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kiln.engine.bench.workload import random_tokens

_SHORTEST = 4  # tokens of a prompt and an answer of ShareGPT that vLLM's benchmark keeps
_LONGEST_PROMPT, _LONGEST = 1024, 2048


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: token ids or a text, the number of its tokens, and how many to generate."""

    prompt: list[int] | str
    prompt_tokens: int
    output_tokens: int


class Dataset(Protocol):
    """Draws requests."""

    @property
    def longest(self) -> int:
        """The most tokens of a request, prompt and output."""

    def draw(self, count: int, seed: int) -> list[Sample]:
        """Return requests: the same for a seed, others for another one."""

    def __str__(self) -> str:
        """Return what it is, for the report."""


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Random tokens.

    Lengths are uniform within ``range_ratio`` of the given ones, as a part of them. Every prompt
    begins with the same ``prefix_tokens`` random tokens, which are not in ``input_tokens``.
    """

    vocab_size: int
    input_tokens: int
    output_tokens: int
    range_ratio: float = 0.0
    prefix_tokens: int = 0

    @property
    def longest(self) -> int:
        """The most tokens of a request, prompt and output."""
        longest = self._bounds(self.input_tokens)[1] + self._bounds(self.output_tokens)[1]
        return self.prefix_tokens + longest

    def draw(self, count: int, seed: int) -> list[Sample]:
        """Return requests."""
        chance = random.Random(seed)
        prefix = random_tokens(chance, self.prefix_tokens, self.vocab_size)
        made = []
        for _ in range(count):
            length = chance.randint(*self._bounds(self.input_tokens))
            prompt = prefix + random_tokens(chance, length, self.vocab_size)
            output = chance.randint(*self._bounds(self.output_tokens))
            made.append(Sample(prompt, len(prompt), output))
        return made

    def _bounds(self, length: int) -> tuple[int, int]:
        low = math.floor(length * (1 - self.range_ratio))
        return max(1, low), math.ceil(length * (1 + self.range_ratio))

    def __str__(self) -> str:
        into, out = map(self._bounds, (self.input_tokens, self.output_tokens))
        shared = f"{self.prefix_tokens:,} shared and " if self.prefix_tokens else ""
        return f"{shared}{_between(into)} random tokens in, {_between(out)} out"


@dataclass(frozen=True, slots=True)
class PrefixRepetition:
    """Prompts of random tokens that begin with one of a few prefixes, in random order."""

    vocab_size: int
    prefix_tokens: int
    suffix_tokens: int
    num_prefixes: int
    output_tokens: int

    @property
    def longest(self) -> int:
        """The tokens of a request, prompt and output."""
        return self.prefix_tokens + self.suffix_tokens + self.output_tokens

    def draw(self, count: int, seed: int) -> list[Sample]:
        """Return requests, about as many for each prefix."""
        chance = random.Random(seed)
        prefixes = [
            random_tokens(chance, self.prefix_tokens, self.vocab_size)
            for _ in range(self.num_prefixes)
        ]
        made = []
        for index in range(count):
            suffix = random_tokens(chance, self.suffix_tokens, self.vocab_size)
            prompt = prefixes[index % self.num_prefixes] + suffix
            made.append(Sample(prompt, len(prompt), self.output_tokens))
        chance.shuffle(made)
        return made

    def __str__(self) -> str:
        return (
            f"{self.num_prefixes} prefixes of {self.prefix_tokens:,} random tokens, each before "
            f"{self.suffix_tokens:,} others, {self.output_tokens:,} out"
        )


@dataclass(frozen=True, slots=True)
class ShareGPT:
    """First turns of recorded conversations, with as many tokens to generate as were answered.

    ``output_tokens``: of every answer instead.
    """

    turns: Sequence[Sample]
    output_tokens: int | None = None

    @classmethod
    def of(cls, turns: Sequence[Sample], output_tokens: int | None = None) -> ShareGPT:
        """Keep the turns whose lengths are those that vLLM's benchmark keeps."""
        kept = []
        for turn in turns:
            output = output_tokens or turn.output_tokens
            answered = output_tokens is not None or output >= _SHORTEST
            fits = turn.prompt_tokens + output <= _LONGEST
            if _SHORTEST <= turn.prompt_tokens <= _LONGEST_PROMPT and answered and fits:
                kept.append(Sample(turn.prompt, turn.prompt_tokens, output))
        return cls(kept, output_tokens)

    @property
    def longest(self) -> int:
        """The most tokens of a request, prompt and output."""
        return max(turn.prompt_tokens + turn.output_tokens for turn in self.turns)

    def draw(self, count: int, seed: int) -> list[Sample]:
        """Return turns in random order; if there are too few, some of them again at random."""
        chance = random.Random(seed)
        drawn = chance.sample(self.turns, min(count, len(self.turns)))
        return drawn + chance.choices(self.turns, k=count - len(drawn))

    def __str__(self) -> str:
        out = "as answered" if self.output_tokens is None else f"{self.output_tokens:,} tokens"
        return f"{len(self.turns):,} first turns of recorded conversations, {out} out"


def _between(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
