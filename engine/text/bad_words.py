"""Words that an output must not contain, as tokens."""

from __future__ import annotations

from kiln.engine.errors import RequestError, field_error
from kiln.engine.requests.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from kiln.engine.text.tokenizer import Tokenizer

_SHOWN = 80  # characters of a word in an error


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return settings whose ``bad_words_token_ids`` include the ``bad_words``.

    Raises RequestError if there are bad words but no tokenizer, and for one of too many tokens.
    """
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise RequestError(
            "bad_words are texts, and the model is loaded without a tokenizer: give "
            "bad_words_token_ids",
            "bad_words",
        )
    listed = [list(word) for word in params.bad_words_token_ids or ()]
    for word in params.bad_words:
        forms = _forms(word, tokenizer)
        longest = max(map(len, forms))
        if not 0 < longest <= MAX_BAD_WORD_TOKENS:
            has = f"{word[:_SHOWN]!r} has {longest} tokens"
            raise field_error("bad_words", f"{has}, and a bad word has 1 to {MAX_BAD_WORD_TOKENS}")
        listed += forms
    return params.replace(bad_words_token_ids=listed)


def _forms(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return a word's tokens at the start of a text, and behind a space where they differ.

    The second form counts only if its first token contains the space. Else the space is a token of
    its own, and what follows it is the first form.
    """
    bare = word.lstrip() or word
    first = tokenizer.encode(bare, add_special_tokens=False)
    spaced = tokenizer.encode(f" {bare}", add_special_tokens=False)
    if len(spaced) == len(first) and spaced[:1] != first[:1]:
        return [first, spaced]
    return [first]
