"""The input and the output of one step: the frozen messages between scheduler and runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kiln.engine.requests.request import TokenLogprobs
from kiln.engine.requests.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step.

    ``token_ids`` are the tokens to compute, the first at position ``num_computed_tokens``;
    ``block_ids`` has slots for all of them. ``samples`` is true if they include the last known
    token, so that the next one is sampled; ``num_output_tokens`` counts those sampled before.
    """

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    samples: bool
    num_output_tokens: int
    params: SamplingParams
    seed: int
    banned_token_ids: frozenset[int]  # stop tokens, before min_tokens is reached
    token_counts: Mapping[int, int] = field(default_factory=dict)  # see Request; not a copy


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one step, in the order of the rows on the device."""

    requests: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return sum(len(request.token_ids) for request in self.requests)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token sampled for one request, with its log-probabilities if requested.

    If ``error`` is set, ``token_id`` means nothing: the logits held NaN or no finite value, or the
    step raises even when it runs this request alone.
    """

    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of a step: a token per request with ``samples``, an error per failed request."""

    tokens: tuple[SampledToken, ...]
