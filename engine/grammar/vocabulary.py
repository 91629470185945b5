"""A model's vocabulary as llguidance reads it, and grammars compiled for it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kiln.engine.errors import RequestError
from kiln.engine.requests.structured_outputs import FIELD

# What one grammar may take. An object of 1,000 optional properties has 3,999 items in a row.
_LIMITS = {
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 100_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
_SHOWN = 300  # characters of what is wrong with a grammar


def read_vocabulary(tokenizer: str, vocab_size: int, eos_token_ids: Iterable[int]) -> Any:
    """Return llguidance's LLTokenizer; it takes most of a second for 128,000 tokens.

    ``tokenizer`` is the content of a tokenizer.json; ``vocab_size`` is that of the logits. Raises
    RequestError if llguidance cannot read it.
    """
    # Imported where it is used: most requests have no grammar.
    from llguidance import LLTokenizer

    try:
        tokenizer = _unspellable(tokenizer)
        return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_token_ids) or None)
    except ValueError as error:
        raise RequestError(
            f"{FIELD}: not with this model's tokenizer: {str(error)[:_SHOWN]}", FIELD
        ) from error


def _unspellable(tokenizer: str) -> str:
    """Return a tokenizer.json in which no text can become a special token.

    llguidance tokenizes text that a grammar forces, such as the only value of an enum. If this gave
    a special token, which is no text to it, the mask would allow a token that the grammar refuses.
    """
    content = json.loads(tokenizer)
    model = content["model"]
    vocab = model.get("vocab", {})
    for token in content.get("added_tokens") or ():
        if not token["special"]:
            continue
        text, token["content"] = token["content"], f"\U0010fffd{token['id']}\U0010fffd"
        if model.get("unk_token") == text:
            model["unk_token"] = token["content"]
        if isinstance(vocab, dict) and text in vocab:
            vocab[token["content"]] = vocab.pop(text)
        elif isinstance(vocab, list) and token["id"] < len(vocab):  # of texts with scores
            vocab[token["id"]][0] = token["content"]
    return json.dumps(content)


def compiled(vocabulary: Any, text: str) -> Any:
    """Return llguidance's LLMatcher of a grammar, at its start. Raises RequestError."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(**_LIMITS))
    check(matcher)
    return matcher


def check(matcher: Any) -> None:
    """Raise RequestError if a matcher has failed."""
    if matcher.is_error():
        raise RequestError(f"{FIELD}: {_said(matcher.get_error())}", FIELD)


def _said(error: str) -> str:
    """Return what is wrong in one line, without the excerpt of the grammar below it."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines()]
    kept = []
    for line in lines:
        if line.startswith("<state>") or "| " in line[:8]:
            break
        if line.strip("^ "):
            kept.append(line)
    return " ".join(kept)[:_SHOWN]
