"""Requests, as clients and the scheduler see them, and their outputs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kiln.engine.requests.pooling import Pooled, PoolingType
from kiln.engine.requests.prefix import PrefixState
from kiln.engine.requests.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as submitted: the message from client to engine.

    ``stop_string_ids`` are the tokens whose text is one of the stop strings. ``grammar`` is the
    grammar of its output, as llguidance reads it. With ``pooling`` it asks for an embedding of its
    prompt, and generates nothing.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    adapter: str | None = None  # name of a LoRA adapter; None: the base model
    stop_string_ids: tuple[int, ...] = ()
    priority: int = 0  # lower is earlier
    cache_salt: str | None = None  # requests with other salts share no cached prefix
    grammar: str | None = None
    pooling: PoolingType | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, at temperature 1 and before any filter.

    ``token_id`` is the sampled token. ``top`` holds (token id, log-probability, rank from 1) of the
    most likely tokens, in order.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float, int]]


class PromptPart(NamedTuple):
    """The tokens of a step whose next token's log-probability is wanted.

    The first of them is ``offset`` tokens behind the request's first one in the step;
    ``token_ids`` are the tokens of the prompt that follow each of them.
    """

    offset: int
    token_ids: list[int]


class TokenOutput(NamedTuple):
    """A request's output of one step: the message from engine to client.

    ``finish_reason`` is None while more tokens may come. ``stop_reason`` is the entry of
    ``stop_token_ids`` or ``stop_string_ids`` that ended it, if any. ``message`` explains the finish
    reason "error". The next four come with the first token: the seed reproduces the output under
    the same settings; the queue time is that from the request's arrival to its first step; the
    log-probabilities are those of the prompt from its second token on, if requested; the cached
    tokens are those of the prompt that were not computed. ``embedding`` is the only output of a
    request that asks for one: the pooled hidden states, float32 [hidden_size], not normalized.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    message: str | None = None
    seed: int | None = None
    queue_seconds: float | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    embedding: bytes | None = None


def merged(outputs: Sequence[TokenOutput]) -> TokenOutput:
    """Return the outputs of one request, in order, as one output."""
    first, last = outputs[0], outputs[-1]
    if len(outputs) == 1:
        return first
    logprobs = None
    if first.logprobs is not None:
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return last._replace(
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs,
        num_cached_tokens=first.num_cached_tokens,
        seed=next((output.seed for output in outputs if output.seed is not None), None),
        queue_seconds=first.queue_seconds,
        prompt_logprobs=first.prompt_logprobs,
    )


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's record of one request. Only the scheduler mutates it.

    ``token_ids`` is prompt plus output. The keys and values of the first ``num_computed_tokens``
    are in the KV blocks ``block_ids``, or will be once the launched steps have run; these will
    append ``num_pending`` tokens, if no draft is rejected. ``row`` is the request's row in the
    runner's tables, -1 while it waits; the row has the first ``num_table_blocks`` blocks. Stop
    tokens end the request from ``min_total_tokens`` tokens on, and are banned before;
    ``max_total_tokens`` end it. ``PriorityQueue`` keeps the request's ``level`` of when it last
    began to wait or to run, the time when it began to wait, and its place.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    min_total_tokens: int
    max_total_tokens: int
    stop_token_ids: frozenset[int]
    is_plain: bool  # see ScheduledRequest
    is_late: bool = False  # see ScheduledRequest
    adapter: str | None = None  # see NewRequest
    adapter_slot: int = -1  # see ScheduledRequest; valid while it runs
    arrival: float = field(default_factory=time.monotonic)
    queue_seconds: float | None = None  # from ``arrival`` to its first step
    num_cached_tokens: int = 0  # of the prompt, that were not computed when it first ran
    prefix: PrefixState = field(default_factory=PrefixState)
    num_computed_tokens: int = 0
    num_pending: int = 0
    row: int = -1
    num_table_blocks: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the second token on
    pooled: Pooled | None = None  # of a request that asks for an embedding
    rotary_start: int = 0  # see ScheduledRequest
    level: int = 0
    waits_since: float = math.inf  # infinite while it does not wait
    place: float = 0.0

    def restart(self) -> None:
        """Make it wait, as if it had never run; its output so far counts as a part of the prompt.

        Its blocks and its row are not returned to anybody.
        """
        self.num_computed_tokens = self.num_pending = self.num_table_blocks = 0
        self.row, self.adapter_slot, self.block_ids = -1, -1, []
        self.prefix = PrefixState(self.prefix.root)
        if self.pooled is not None:
            self.pooled = self.pooled.from_start()

    def begin(self, row: int) -> bool:
        """Give a waiting request its row; return whether it is its first one."""
        self.row = row
        if self.queue_seconds is not None:
            return False
        self.queue_seconds = time.monotonic() - self.arrival
        return True

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been generated."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_cacheable(self) -> int:
        """How many of its first tokens need not be computed, if their keys and values are known.

        The last one always is, and so are those of the prompt whose log-probabilities or hidden
        states are wanted.
        """
        if self.pooled is not None and not self.pooled.is_complete:
            return self.pooled.done
        known = len(self.prompt_logprobs)
        if self.params.prompt_logprobs is not None and known < self.num_prompt_tokens - 1:
            return known
        return len(self.token_ids) - 1

    @property
    def told_once(self) -> tuple[int | None, float | None, list[TokenLogprobs] | None, int, None]:
        """The last fields of the first TokenOutput, which has no embedding."""
        if self.num_output_tokens:
            return None, None, None, 0, None
        reported = self.prompt_logprobs if self.params.prompt_logprobs is not None else None
        return self.seed, self.queue_seconds, reported, self.num_cached_tokens, None

    def prompt_part(self, start: int, count: int) -> PromptPart | None:
        """Return the part of a step whose log-probabilities are wanted, if any is.

        The step computes ``count`` tokens from position ``start`` on. A preempted request does not
        report a token twice.
        """
        first = max(start, len(self.prompt_logprobs))
        end = min(start + count, self.num_prompt_tokens - 1)
        if self.params.prompt_logprobs is None or first >= end:
            return None
        return PromptPart(first - start, self.token_ids[first + 1 : end + 1])

    def report_prompt(self, first: int, logprobs: list[TokenLogprobs]) -> None:
        """Keep the log-probabilities that are new, of the tokens behind position ``first``."""
        self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - first :]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One entry of ``CompletionOutput.logprobs``, with vLLM's names."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` outputs for a prompt.

    ``error`` explains the finish reason "error". ``seed`` and the same settings reproduce the
    output; it is None before the first token. ``text_offsets``, kept only with log-probabilities,
    says for each token at which character of the text it begins.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    seed: int | None = None
    text_offsets: list[int] | None = None


@dataclass(slots=True)
class RequestOutput:
    """All outputs for one prompt of ``LLM.generate``.

    ``prompt_logprobs``, if requested, has an entry for each token of the prompt: None for the
    first, then as in CompletionOutput. ``num_cached_tokens`` of the prompt were not computed,
    because they were known; with ``n`` outputs they are those of the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
