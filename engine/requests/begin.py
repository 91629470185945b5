"""From a request as submitted to the scheduler's record of it."""

from __future__ import annotations

from kiln.engine.requests.finish import stop_token_ids
from kiln.engine.requests.pooling import Pooled
from kiln.engine.requests.request import NewRequest, Request


def begin_request(
    new: NewRequest,
    seed: int,
    max_total_tokens: int,
    eos_token_ids: frozenset[int],
    *,
    is_late: bool = False,
) -> Request:
    """Return the record of a request of at most ``max_total_tokens``, prompt and output."""
    params, prompt = new.params, len(new.prompt_token_ids)
    total, pooled = max_total_tokens, None
    if new.pooling is not None:
        total, pooled = prompt, Pooled.begin(new.pooling, prompt)
    elif params.max_tokens is not None:
        total = min(total, prompt + params.max_tokens)
    return Request(
        request_id=new.request_id,
        token_ids=list(new.prompt_token_ids),
        num_prompt_tokens=prompt,
        params=params,
        seed=seed,
        min_total_tokens=prompt + params.min_tokens,
        max_total_tokens=total,
        stop_token_ids=stop_token_ids(new, eos_token_ids),
        is_plain=params.is_plain and not is_late,
        is_late=is_late,
        adapter=new.adapter,
        pooled=pooled,
        level=new.priority,
    )
