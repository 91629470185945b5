"""Read a ``tekken.json``, the tokenizer file of Mistral's models, without a tokenizer library.

Its token ids are those of the special tokens, then those of the pieces. A file may list more of
both than the model has.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kiln.engine.errors import ModelError
from kiln.engine.models.model_folder import read_json

# Of files that list none, which are older than version 8.
_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
BOS, EOS = "<s>", "</s>"


@dataclass(frozen=True, slots=True)
class TekkenFile:
    """A vocabulary: the first ids are special tokens, and the others pieces of bytes.

    A text is split by the regular expression ``pattern``; in each part, the pair of pieces is
    merged whose union comes first in ``pieces``, until no union is a piece.
    """

    pattern: str
    special_tokens: tuple[str, ...]
    pieces: tuple[bytes, ...]  # the first 256 are the single bytes


def read_tekken(path: Path) -> TekkenFile:
    """Return the vocabulary of a file. Raises ModelError if it is broken."""
    content = read_json(path)
    try:
        return _checked(content)
    except (LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: cannot be read as a tekken tokenizer ({error}): is it complete?"
        ) from error


def _checked(content: dict[str, Any]) -> TekkenFile:
    config = content["config"]
    num_special, size = config["default_num_special_tokens"], config["default_vocab_size"]
    listed = content.get("special_tokens")
    names = (
        _SPECIAL_TOKENS if listed is None else [_in_place(listed, i) for i in range(len(listed))]
    )
    fillers = (f"<SPECIAL_{index}>" for index in range(len(names), num_special))
    special = (*names, *fillers)
    _require(all(isinstance(name, str) and name for name in special), "a special token is no text")
    _require(len(special) == num_special == len(set(special)), "special tokens are not as counted")
    _require(EOS in special and BOS in special, f"{BOS} or {EOS} is missing")
    entries = content["vocab"][: size - num_special]
    pieces = tuple(base64.b64decode(entry["token_bytes"], validate=True) for entry in entries)
    _require(len(pieces) == size - num_special == len(set(pieces)), "pieces are not as counted")
    _require(b"".join(pieces[:256]) == bytes(range(256)), "the first pieces are not the bytes")
    pattern = config["pattern"]
    _require(isinstance(pattern, str), "the pattern is no text")
    return TekkenFile(pattern, special, pieces)


def _in_place(listed: Any, index: int) -> str:
    """Return the special token with an id, which is its place in the list."""
    entry = listed[index]
    _require(entry["rank"] == index, f"special token {index} has the rank {entry['rank']!r:.80}")
    return str(entry["token_str"])


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise ValueError(problem)
