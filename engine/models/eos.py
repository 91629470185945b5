"""The tokens that end a text, as the files of a model and of its tokenizer say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kiln.engine.errors import ModelError
from kiln.engine.models.fields import OVERRIDES
from kiln.engine.models.model_folder import (
    ModelFiles,
    model_vocab_size,
    read_json,
    read_model_config,
    sentencepiece_path,
    tekken_path,
    text_config,
)
from kiln.engine.models.sentencepiece_file import read_sentencepiece
from kiln.engine.models.tekken_file import EOS, read_tekken

logger = logging.getLogger(__name__)


def eos_token_ids(files: ModelFiles, vocab_size: int | None = None) -> frozenset[int]:
    """Return the EOS token ids of the model and of its tokenizer.

    The model's are in generation_config.json, else in config.json, where a wrapper of several
    models may have them in ``text_config``. Overrides of config.json come first. The tokenizer of a
    fine-tuned model may name another, the end of a turn, which those files lack. Ids outside of the
    model's vocabulary, which has ``vocab_size`` tokens or those of config.json, are dropped with a
    warning. Raises ModelError if an entry is no id.
    """
    own = _tokenizer_eos(files.tokenizer_folder)
    found = set() if own is None else {own}
    path, config = files.folder / "generation_config.json", files.folder / "config.json"
    places: list[tuple[Path | str, Mapping[str, Any]]] = [
        (OVERRIDES, files.overrides),
        (path, read_json(path)),
        (config, read_model_config(files)),
    ]
    for place, content in places:
        ids = content.get("eos_token_id")
        ids = text_config(content).get("eos_token_id") if ids is None else ids
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(type(token) is int for token in listed):
                shown = repr(ids)[:80]
                raise ModelError(
                    f"{place}: eos_token_id is {shown}, want a token id or a list of ids"
                )
            found |= set(listed)
            break
    size = model_vocab_size(files) if vocab_size is None else vocab_size
    drawn = frozenset(token for token in found if token >= 0 and (size is None or token < size))
    for token in sorted(found - drawn):
        logger.warning(
            "%s: the EOS id %s is ignored: the model's vocabulary has %s tokens",
            files.folder,
            token,
            size or "no negative",
        )
    return drawn


def _tokenizer_eos(folder: Path) -> int | None:
    """Return the id of the tokenizer's ``eos_token``, without loading the tokenizer."""
    path, tekken = sentencepiece_path(folder), tekken_path(folder)
    model = None if path is None else read_sentencepiece(path)
    special = () if tekken is None else read_tekken(tekken).special_tokens
    config = read_json(folder / "tokenizer_config.json")
    token = config.get("eos_token") or read_json(folder / "special_tokens_map.json").get(
        "eos_token"
    )
    text = token.get("content") if isinstance(token, dict) else token
    if model is not None and "eos_token" not in config:
        text = text or model.special_tokens.get("eos_token")
    if tekken is not None and text is None:
        text = EOS
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
        known = {token: index for index, token in enumerate(special)} | known
        return int(known[text]) if text in known else None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder}: the id of the tokenizer's eos_token {str(text)[:80]!r} cannot be read "
            f"({error}): are its files complete?"
        ) from error
