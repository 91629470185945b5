"""The vocabulary of a model folder, for grammars."""

from __future__ import annotations

from typing import Any

from kiln.engine.errors import field_error
from kiln.engine.grammar.vocabulary import read_vocabulary
from kiln.engine.models.model_folder import ModelSettings, find_model_files
from kiln.engine.models.registry import vocabulary_size
from kiln.engine.requests.structured_outputs import FIELD
from kiln.engine.text.tokenizer import Tokenizer


def vocabulary_of(model: ModelSettings) -> Any:
    """Return llguidance's LLTokenizer of a model.

    Raises RequestError if the model has no tokenizer, or none that llguidance can read; ModelError
    if config.json is no supported model's.
    """
    files = find_model_files(model)
    tokenizer = Tokenizer.load_if_present(files, with_chats=False)
    if tokenizer is None:
        raise field_error(FIELD, "the model has no tokenizer, which it needs")
    size = vocabulary_size(files)
    return read_vocabulary(tokenizer.backend.to_str(), size, tokenizer.eos_token_ids)
