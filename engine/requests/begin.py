"""From a request as submitted to the scheduler's record of it."""

from __future__ import annotations

import sys

from kiln.engine.requests.finish import stop_token_ids
from kiln.engine.requests.pooling import Pooled
from kiln.engine.requests.request import NewRequest, Request


def begin_request(
    new: NewRequest,
    seed: int,
    max_total_tokens: int,
    eos_token_ids: frozenset[int],
    long_start: int = 0,
    *,
    is_late: bool = False,
) -> Request:
    """Return the record of a request of at most ``max_total_tokens``, prompt and output.

    With ``long_start``, all tokens of a request that may become longer have other rotary
    frequencies. That depends on prompt and ``max_tokens`` alone: not on other requests, and not on
    the memory of this engine.
    """
    params, prompt = new.params, len(new.prompt_token_ids)
    asked, pooled = sys.maxsize, None
    if new.pooling is not None:
        asked, pooled = prompt, Pooled.begin(new.pooling, prompt)
    elif params.max_tokens is not None:
        asked = prompt + params.max_tokens
    return Request(
        request_id=new.request_id,
        token_ids=list(new.prompt_token_ids),
        num_prompt_tokens=prompt,
        params=params,
        seed=seed,
        min_total_tokens=prompt + params.min_tokens,
        max_total_tokens=min(asked, max_total_tokens),
        stop_token_ids=stop_token_ids(new, eos_token_ids),
        is_plain=params.is_plain and not is_late,
        is_late=is_late,
        adapter=new.adapter,
        pooled=pooled,
        rotary_start=long_start if asked > long_start else 0,
        level=new.priority,
    )
