"""When a generation ends, and why."""

from __future__ import annotations

from kiln.engine.request import FinishReason, Request
from kiln.engine.sampling_params import SamplingParams


def stop_token_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return every token that ends the request: the model's own unless ignored, and the listed."""
    listed = frozenset(params.stop_token_ids or ())
    return listed if params.ignore_eos else listed | eos_token_ids


def banned_token_ids(request: Request) -> frozenset[int]:
    """Return the tokens that must not be drawn next: the stop tokens, until ``min_tokens``."""
    if request.num_output_tokens < request.params.min_tokens:
        return request.stop_token_ids
    return frozenset()


def finish_reason(request: Request) -> FinishReason | None:
    """Say why a request ends with its newest token, or None if it goes on."""
    past_minimum = request.num_output_tokens >= request.params.min_tokens
    if past_minimum and request.token_ids[-1] in request.stop_token_ids:
        return "stop"
    if len(request.token_ids) >= request.max_total_tokens:
        return "length"
    return None


def stop_reason(request: Request, eos_token_ids: frozenset[int]) -> int | None:
    """Return the listed stop token that ended the request; None for the model's own."""
    token = request.token_ids[-1]
    eos = token in eos_token_ids and not request.params.ignore_eos
    return None if eos else token
