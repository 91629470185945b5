"""What can be refused of a request when it comes: prompts and tokens that the model cannot have."""

from __future__ import annotations

from collections.abc import Sequence

from kiln.engine.errors import RequestError, too_long
from kiln.engine.requests.request import NewRequest


def check_tokens(new: NewRequest, context: int, vocab_size: int) -> None:
    """Check a request for a model of ``context`` and ``vocab_size`` tokens. Raises RequestError."""
    length, params = len(new.prompt_token_ids), new.params
    if length == 0:
        raise RequestError("the prompt is empty: give at least one token", "prompt")
    if length >= context:
        raise too_long(
            context, f"the prompt has {length} tokens, and the output needs at least one"
        )
    lists: list[tuple[Sequence[int], str]] = [
        (new.prompt_token_ids, "prompt"),
        (params.stop_token_ids or (), "stop_token_ids"),
        (list(params.logit_bias or ()), "logit_bias"),
        (params.allowed_token_ids or (), "allowed_token_ids"),
        *((word, "bad_words_token_ids") for word in params.bad_words_token_ids or ()),
    ]
    for token_ids, name in lists:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise RequestError(
                f"{name} has token id {wrong}, but the vocabulary is 0 to {vocab_size - 1}", name
            )
