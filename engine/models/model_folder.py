"""Locate a model's folder and read its small JSON files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from kiln.engine.errors import ModelError
from kiln.engine.models.hub import download
from kiln.engine.models.sentencepiece_file import read_sentencepiece

logger = logging.getLogger(__name__)


def resolve_model_folder(model: str) -> Path:
    """Return the local folder of a model, given as a folder or as a hub id like ``org/name``.

    A hub id without a local copy is downloaded. Raises ModelError naming what is missing and what
    to do.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    looks_like_path = folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1
    if folder.exists() or looks_like_path:
        raise ModelError(f"model {model!r}: no such folder, and not a hub id")
    return download(model)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist. Raises ModelError."""
    content = read_any_json(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ModelError(f"{path}: contains a {type(content).__name__}, not a JSON object")
    return content


def read_any_json(path: Path) -> Any:
    """Return the JSON value in a file; None if the file does not exist. Raises ModelError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # also of numbers and nesting
        raise ModelError(f"{path}: cannot be read as JSON ({error}): is it complete?") from error


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the EOS token ids of the model and of its tokenizer.

    The model's are in generation_config.json, else in config.json. The tokenizer of a fine-tuned
    model may name another, the end of a turn, which those files lack. Ids outside of the model's
    vocabulary are dropped, with a warning. Raises ModelError if an entry is no id.
    """
    own = _tokenizer_eos(folder)
    found = set() if own is None else {own}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = read_json(path).get("eos_token_id")
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(type(token) is int for token in listed):
                shown = repr(ids)[:80]
                raise ModelError(
                    f"{path}: eos_token_id is {shown}, want a token id or a list of ids"
                )
            found |= set(listed)
            break
    size = model_vocab_size(folder)
    drawn = frozenset(token for token in found if token >= 0 and (size is None or token < size))
    for token in sorted(found - drawn):
        logger.warning(
            "%s: the EOS id %s is ignored: the model's vocabulary has %s tokens",
            folder,
            token,
            size or "no negative",
        )
    return drawn


def model_vocab_size(folder: Path) -> int | None:
    """Return how many tokens the model can draw, by config.json; None if it does not say."""
    size = read_json(folder / "config.json").get("vocab_size")
    return size if type(size) is int else None


def sentencepiece_path(folder: Path) -> Path | None:
    """Return the sentencepiece file of a folder without tokenizer.json, or None.

    A file of that name with tokens in base64, as of Llama 3, is none.
    """
    path = folder / "tokenizer.model"
    if (folder / "tokenizer.json").exists() or not path.is_file():
        return None
    with path.open("rb") as file:
        return path if file.read(1) == b"\n" else None  # the mark of the first piece


def _tokenizer_eos(folder: Path) -> int | None:
    """Return the id of the tokenizer's ``eos_token``, without loading the tokenizer."""
    path = sentencepiece_path(folder)
    model = None if path is None else read_sentencepiece(path)
    config = read_json(folder / "tokenizer_config.json")
    token = config.get("eos_token") or read_json(folder / "special_tokens_map.json").get(
        "eos_token"
    )
    text = token.get("content") if isinstance(token, dict) else token
    if model is not None and "eos_token" not in config:
        text = text or model.special_tokens.get("eos_token")
    if text is None:
        return None
    try:
        for token_id, added in config.get("added_tokens_decoder", {}).items():
            if added.get("content") == text:
                return int(token_id)
        tokenizer = read_json(folder / "tokenizer.json")
        for added in tokenizer.get("added_tokens", []):
            if added.get("content") == text:
                return int(added["id"])
        vocabulary = tokenizer.get("model", {}).get("vocab")
        older = read_json(folder / "added_tokens.json")
        known = vocabulary | older if isinstance(vocabulary, dict) else older
        if model is not None:
            known = {piece.text: index for index, piece in enumerate(model.pieces)} | known
        return int(known[text]) if text in known else None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder}: the id of the tokenizer's eos_token {str(text)[:80]!r} cannot be read "
            f"({error}): are its files complete?"
        ) from error
