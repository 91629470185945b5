"""Stop conditions and finish reasons."""

from __future__ import annotations

from kiln.engine.requests.request import FinishReason, Request
from kiln.engine.requests.sampling_params import SamplingParams

_NONE: frozenset[int] = frozenset()


def stop_token_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end the request: EOS unless ignored, and ``stop_token_ids``."""
    listed = frozenset(params.stop_token_ids or ())
    return listed if params.ignore_eos else listed | eos_token_ids


def banned_token_ids(request: Request) -> frozenset[int]:
    """Return the tokens that must not be sampled next: stop tokens, before ``min_tokens``."""
    if request.num_output_tokens + request.num_pending < request.params.min_tokens:
        return request.stop_token_ids
    return _NONE


def finish_reason(request: Request) -> FinishReason | None:
    """Return why a request ends with its newest token, or None if it continues."""
    past_minimum = request.num_output_tokens >= request.params.min_tokens
    if past_minimum and request.token_ids[-1] in request.stop_token_ids:
        return "stop"
    if len(request.token_ids) >= request.max_total_tokens:
        return "length"
    return None


def stop_reason(request: Request, eos_token_ids: frozenset[int]) -> int | None:
    """Return the stop token id that ended the request; None for EOS."""
    token = request.token_ids[-1]
    eos = token in eos_token_ids and not request.params.ignore_eos
    return None if eos else token
