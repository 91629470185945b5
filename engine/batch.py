"""What one step runs, and what it gave: the frozen messages between scheduler and runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kiln.engine.request import TokenLogprobs
from kiln.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step.

    ``token_ids`` are the tokens to compute, the first at position ``num_computed_tokens``;
    ``block_ids`` has room for all of them. ``samples`` is true when they reach the last known
    token, so that the next one is drawn; ``num_output_tokens`` counts those drawn before.
    """

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    samples: bool
    num_output_tokens: int
    params: SamplingParams
    seed: int
    banned_token_ids: frozenset[int]  # stop tokens that must not be drawn before min_tokens
    token_counts: Mapping[int, int] = field(default_factory=dict)  # see Request; not a copy


@dataclass(frozen=True, slots=True)
class Batch:
    """What runs in one step, in the order of the rows on the device."""

    requests: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return sum(len(request.token_ids) for request in self.requests)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token drawn for one request, with its log-probabilities if they were asked for.

    ``error`` is set instead of a meaningful token when the row failed: it held NaN or no finite
    logit, or its request alone makes the step raise.
    """

    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step drew: a token for each request with ``samples``, an error for any that failed."""

    tokens: tuple[SampledToken, ...]
