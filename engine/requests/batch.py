"""The input and the output of one step: the messages between scheduler and runner.

Those of one request are named tuples, which are cheap: a large step makes hundreds of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from kiln.engine.requests.pooling import HiddenPart
from kiln.engine.requests.request import PromptPart, TokenLogprobs
from kiln.engine.requests.sampling_params import SamplingParams


class ScheduledRequest(NamedTuple):
    """One request's part of a step.

    It computes ``num_tokens`` tokens, the first at position ``num_computed_tokens``. They are
    ``token_ids``; if these are empty, the token that the step before sampled, which may still be on
    the device. Drafts of the device follow. Without ``token_ids`` the host may not know either how
    many drafts the step before accepted: then ``num_computed_tokens`` and ``num_output_tokens`` are
    as if all were, and the device corrects them.

    ``row`` is the request's row in the runner's tables, from 0 to ``max_num_seqs - 1``. The row has
    the request's first ``num_blocks`` blocks, none at its first step; this step appends
    ``new_block_ids``. Behind each of the last ``num_samples`` tokens the next one is sampled: none
    in the middle of a prompt; else one, and one more for each draft. ``num_output_tokens`` counts
    those sampled before. ``adapter_slot`` is the place of the request's LoRA adapter, -1 for the
    base model. The rows of the rotary table from ``rotary_start`` on are for its positions.
    """

    request_id: str
    row: int
    num_tokens: int
    num_computed_tokens: int
    token_ids: list[int]
    num_blocks: int
    new_block_ids: list[int]
    num_samples: int
    num_output_tokens: int
    params: SamplingParams
    seed: int
    banned_token_ids: frozenset[int] = frozenset()  # stop tokens, before min_tokens is reached
    is_plain: bool = False  # no logit is edited or masked, and no log-probability requested
    adapter_slot: int = -1
    rotary_start: int = 0
    prompt: PromptPart | None = None  # with ``prompt_logprobs``, while the prompt is computed
    hidden: HiddenPart | None = None  # the tokens the sum of whose hidden states is wanted
    is_late: bool = False  # its mask is made from all tokens before it: see ``late_masks``


@dataclass(frozen=True)
class Batch:
    """The requests of one step, in the order of their tokens.

    Behind the step the device makes ``wanted_drafts`` drafts for each request that samples.
    """

    requests: tuple[ScheduledRequest, ...]
    wanted_drafts: int = 0

    @cached_property
    def columns(self) -> Any:
        """The requests by field: a ScheduledRequest whose fields are tuples over all requests."""
        return ScheduledRequest._make(zip(*self.requests, strict=True))

    @cached_property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return sum(self.columns.num_tokens) if self.requests else 0

    @cached_property
    def num_samples(self) -> int:
        """How many tokens the step samples."""
        return sum(self.columns.num_samples)

    @cached_property
    def row_tokens(self) -> int:
        """The most tokens of a request, if each request samples behind all of its tokens; else 0.

        Then each computes the token that was sampled last, and its drafts.
        """
        of = self.columns
        return max(of.num_tokens) if of.num_tokens == of.num_samples else 0

    @property
    def is_decode(self) -> bool:
        """Whether each request computes the token that was sampled last, and its drafts."""
        return self.row_tokens > 0

    @property
    def has_drafts(self) -> bool:
        """Whether a request computes drafts."""
        return bool(max(self.columns.num_samples) > 1)

    @property
    def is_plain(self) -> bool:
        """Whether no request edits a logit or asks for log-probabilities."""
        return all(self.columns.is_plain)

    @property
    def is_late(self) -> bool:
        """Whether sampling has to wait for the mask of a request."""
        return any(self.columns.is_late) and self.num_samples > 0

    @property
    def reports_prompts(self) -> bool:
        """Whether a request wants log-probabilities of prompt tokens."""
        return any(self.columns.prompt)

    @property
    def reports_hidden(self) -> bool:
        """Whether a request wants hidden states."""
        return any(self.columns.hidden)

    @property
    def reports(self) -> bool:
        """Whether a request wants either."""
        return bool(self.requests) and (self.reports_prompts or self.reports_hidden)

    @property
    def has_adapters(self) -> bool:
        """Whether a request uses a LoRA adapter."""
        slots: tuple[int, ...] = self.columns.adapter_slot
        return max(slots) >= 0


class SampledTokens(NamedTuple):
    """The tokens sampled for one request, with their log-probabilities if requested.

    ``prompt_logprobs`` are those of the row's ``prompt``, and ``hidden`` is the sum of the final
    hidden states of its ``hidden``, float32 [hidden_size]; a row may have them and no tokens. If
    ``error`` is set there are no tokens: the logits held NaN or no finite value, or the step raises
    even when it runs this request alone.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    hidden: Any = None  # a tensor on the host
    num_drafts: int = 0  # drafts of the device in its row, without those that only fill it


class StepOutput(NamedTuple):
    """The result of a step: tokens for each request that samples, an error for each that failed.

    A request that samples and is missing here is computed again from its last token. ``graph`` is
    the size of the CUDA graph that ran the step; "": none did, and ``why_eager`` says why.
    """

    tokens: tuple[SampledTokens, ...]
    graph: str = ""
    why_eager: str = ""
