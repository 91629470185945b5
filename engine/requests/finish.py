"""Stop conditions and finish reasons."""

from __future__ import annotations

from kiln.engine.requests.request import FinishReason, Request
from kiln.engine.requests.sampling_params import SamplingParams


def stop_token_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end the request: EOS unless ignored, and ``stop_token_ids``."""
    listed = frozenset(params.stop_token_ids or ())
    return listed if params.ignore_eos else listed | eos_token_ids


def finish_reason(request: Request) -> FinishReason | None:
    """Return why a request ends with its newest token, or None if it continues."""
    tokens = request.token_ids
    if tokens[-1] in request.stop_token_ids and len(tokens) >= request.min_total_tokens:
        return "stop"
    return "length" if len(tokens) >= request.max_total_tokens else None


def stop_reason(request: Request, eos_token_ids: frozenset[int]) -> int | None:
    """Return the stop token id that ended the request; None for EOS."""
    token = request.token_ids[-1]
    eos = token in eos_token_ids and not request.params.ignore_eos
    return None if eos else token
