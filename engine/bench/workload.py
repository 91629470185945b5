"""The prompts and output lengths that every engine gets, and what a run of them gave.

A seed and bounds fix every token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kiln.engine.bench.report import Row

_FIRST_TOKEN = 3  # the ids below are usually special tokens
_END_TOKEN = 10_000  # exclusive; as in nano-vllm's benchmark

Lengths = tuple[int, int]  # the shortest and the longest, in tokens


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """Requests of random lengths that arrive at once; the defaults are nano-vllm's benchmark."""

    num_prompts: int = 256
    prompt_tokens: Lengths = (100, 1024)
    output_tokens: Lengths = (100, 1024)

    @property
    def longest(self) -> int:
        """The most tokens that a request can have, prompt and output."""
        return self.prompt_tokens[1] + self.output_tokens[1]

    def draw(self, vocab_size: int) -> tuple[list[list[int]], list[int]]:
        """Return the prompts and the output lengths."""
        chance = random.Random(0)
        prompts, lengths = [], []
        for _ in range(self.num_prompts):
            prompts.append(random_tokens(chance, chance.randint(*self.prompt_tokens), vocab_size))
            lengths.append(chance.randint(*self.output_tokens))
        return prompts, lengths


def equal_prompts(count: int, num_tokens: int, vocab_size: int, seed: int = 1) -> list[list[int]]:
    """Return ``count`` prompts of ``num_tokens`` tokens each, others for another seed."""
    chance = random.Random(seed)
    return [random_tokens(chance, num_tokens, vocab_size) for _ in range(count)]


def warm_up_load(
    prompt_tokens: int, output_tokens: int, vocab_size: int
) -> tuple[list[list[int]], list[int]]:
    """Return two prompts and their output lengths, no longer than the given ones."""
    prompts = equal_prompts(2, min(64, prompt_tokens), vocab_size)
    return prompts, [min(16, output_tokens)] * 2


def throughput(requests: int, prompt_tokens: int, output_tokens: int, seconds: float) -> Row:
    """Return the counts and rates of a run of whole requests."""
    return {
        "requests": requests,
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / seconds,
        "requests_per_s": requests / seconds,
    }


def random_tokens(chance: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    """Return tokens from the part of a vocabulary that has no special tokens, as a rule."""
    first, end = min(_FIRST_TOKEN, vocab_size - 1), min(_END_TOKEN, vocab_size)
    return [chance.randrange(first, end) for _ in range(num_tokens)]
