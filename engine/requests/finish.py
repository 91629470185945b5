"""How requests end: stop conditions, finish reasons, and embeddings that are complete."""

from __future__ import annotations

from kiln.engine.errors import RequestError
from kiln.engine.requests.batch import SampledTokens, ScheduledRequest
from kiln.engine.requests.request import FinishReason, NewRequest, Request, TokenOutput
from kiln.engine.requests.sampling_params import MAX_BIAS


def stop_token_ids(new: NewRequest, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end a request: EOS unless ignored, and those that it lists."""
    listed = frozenset((*(new.params.stop_token_ids or ()), *new.stop_string_ids))
    return listed if new.params.ignore_eos else listed | eos_token_ids


def check_some_token(new: NewRequest, eos_token_ids: frozenset[int], vocab_size: int) -> None:
    """Raise RequestError if the settings of a request leave no token that may be drawn.

    Before ``min_tokens`` stop tokens are banned too. A bias of -100 counts as a ban then, as in
    OpenAI's API.
    """
    params = new.params
    allowed = frozenset(params.allowed_token_ids or ())
    banned = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    if allowed and allowed <= banned:
        raise RequestError(
            "allowed_token_ids: each of them is one of bad_words: leave some", "allowed_token_ids"
        )
    if params.min_tokens == 0:
        return
    biases = params.logit_bias or {}
    banned |= {token for token, bias in biases.items() if bias <= -MAX_BIAS}
    banned |= stop_token_ids(new, eos_token_ids)
    if allowed <= banned if allowed else len(banned) >= vocab_size:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but until then EOS, stop, stop_token_ids, "
            f"bad_words and logit_bias ban all {len(allowed) or vocab_size} tokens "
            f"{'that are allowed' if allowed else 'of the vocabulary'}: leave some, or drop "
            "min_tokens",
            "min_tokens",
        )


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


def note_reports(request: Request, row: ScheduledRequest, tokens: SampledTokens) -> None:
    """Keep what a step reports of a request besides the tokens that it sampled."""
    start = row.num_computed_tokens
    if row.prompt is not None and tokens.prompt_logprobs:
        request.report_prompt(start + row.prompt.offset, tokens.prompt_logprobs)
    if request.pooled is not None and row.hidden is not None and tokens.hidden is not None:
        request.pooled = request.pooled.plus(start, row.hidden, tokens.hidden)


def embedding_output(request: Request) -> TokenOutput | None:
    """Return the last output of a request that asks for an embedding; None: it is not complete."""
    if request.pooled is None or not request.pooled.is_complete:
        return None
    return TokenOutput(
        request.request_id,
        [],
        "stop",
        queue_seconds=request.queue_seconds,
        num_cached_tokens=request.num_cached_tokens,
        embedding=request.pooled.embedding,
    )
