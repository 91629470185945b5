"""The vocabulary of a model folder, for grammars."""

from __future__ import annotations

from typing import Any

from kiln.engine.errors import field_error
from kiln.engine.grammar.vocabulary import read_vocabulary
from kiln.engine.models.model_folder import resolve_model_folder
from kiln.engine.requests.structured_outputs import FIELD
from kiln.engine.text.tokenizer import Tokenizer


def vocabulary_of(model: str, vocab_size: int, eos_token_ids: frozenset[int]) -> Any:
    """Return llguidance's LLTokenizer of a model folder, for logits of ``vocab_size`` tokens.

    Raises RequestError if the model has no tokenizer, or none that llguidance can read.
    """
    tokenizer = Tokenizer.load_if_present(resolve_model_folder(model))
    if tokenizer is None:
        raise field_error(FIELD, "the model has no tokenizer, which it needs")
    return read_vocabulary(tokenizer.backend.to_str(), vocab_size, eos_token_ids)
