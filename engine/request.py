"""A request on its way through the engine, and what comes out for its user."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from kiln.engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """One generation as a client submits it: the message from client to engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, after temperature 1 and before any filter.

    ``token_id`` is the drawn token; ``top`` holds (token id, log-probability, rank from 1) of the
    most likely ones, most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float, int]]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step gave one request: the message from engine to client.

    ``finish_reason`` is None while more tokens may come. ``stop_reason`` is the stop token id
    that ended it, if a listed one did. ``message`` explains the finish reason "error". ``seed``
    comes with the first token: it and the same settings draw the answer again.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    message: str | None = None
    seed: int | None = None


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's record of one generation. Only the scheduler mutates it.

    ``token_ids`` is prompt then output; ``num_computed_tokens`` of them have their keys and
    values in the KV pool, in the blocks of ``block_ids``. ``token_counts`` is how often each of
    them is in the output, 0 for the prompt's others; it is kept only where penalties ask for it.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_total_tokens: int
    stop_token_ids: frozenset[int]
    arrival: float = field(default_factory=time.monotonic)
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    token_counts: dict[int, int] = field(default_factory=dict)

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been generated."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Logprob:
    """One entry of ``CompletionOutput.logprobs``, with vLLM's names."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` answers to a prompt.

    ``error`` explains the finish reason "error". With ``seed`` and the same other settings the
    same answer is drawn again; it is None until the first token is there.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    seed: int | None = None


@dataclass(slots=True)
class RequestOutput:
    """Everything one prompt of ``LLM.generate`` gave."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
