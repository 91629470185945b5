"""A tokenizer from a sentencepiece model file alone: the same ids as sentencepiece.

Special tokens are found in the text, and each text between them is encoded as sentencepiece does.
With ``"legacy": false`` in tokenizer_config.json only a text at the very start gets the space in
front that sentencepiece adds, as in transformers.

Models like Llama's, BPE without normalisation, run on the tokenizers library. For others that
library gives other ids now and then: it sums scores in another precision, and normalises clusters
of characters. Those run on the sentencepiece library.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    NormalizedString,
    PreTokenizedString,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from kiln.engine.errors import ModelError
from kiln.engine.models.sentencepiece_file import Kind, SentencePieceModel

_SPACE = "▁"
# A protobuf message may come in parts. This one sets normalizer_spec.add_dummy_prefix to false.
_NO_PREFIX = b"\x1a\x02\x18\x00"


def sentencepiece_backend(model: SentencePieceModel, path: Path, config: dict[str, Any]) -> Backend:
    """Return a tokenizer of the model in a file; ``config`` is tokenizer_config.json.

    Raises ModelError if it needs the sentencepiece library, which is missing.
    """
    if config.get("add_prefix_space") is False:
        model = replace(model, add_dummy_prefix=False)
    only_first = config.get("legacy") is False
    kinds = {piece.kind for piece in model.pieces}
    if model.is_bpe and not model.edits_text and not kinds & {Kind.USER_DEFINED, Kind.UNUSED}:
        backend = _bpe(model, only_first)
    else:
        backend = _wrapped(model, path, only_first)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            *([decoders.ByteFallback()] if model.byte_fallback else []),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []),
        ]
    )
    special = [p.text for p in model.pieces if p.kind in (Kind.CONTROL, Kind.UNKNOWN)]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    _add_template(backend, model, config)
    return backend


def _bpe(model: SentencePieceModel, only_first: bool) -> Backend:
    """Merge the pair whose union has the best score; of one union, the longest left part first."""
    vocabulary = {piece.text: index for index, piece in enumerate(model.pieces)}
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind == Kind.NORMAL}
    merges = sorted(
        (-score, -at, text[:at], text[at:])
        for text, score in scores.items()
        for at in range(1, len(text))
        if text[:at] in scores and text[at:] in scores
    )
    backend = Backend(
        models.BPE(
            vocabulary,
            [(left, right) for _, _, left, right in merges],
            unk_token=model.special_tokens.get("unk_token"),
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    )
    replace = normalizers.Replace(" ", _SPACE)
    if model.add_dummy_prefix and not only_first:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        return backend
    backend.normalizer = replace
    if model.add_dummy_prefix:
        # A step leaves out its space if the text has one, so a step of its own adds it: the
        # normalizer has replaced all spaces before.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False),
                pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=False),
            ]
        )
    return backend


def _wrapped(model: SentencePieceModel, path: Path, only_first: bool) -> Backend:
    """Let sentencepiece split the text, and tokenizers look up the pieces."""
    unknown = model.special_tokens.get("unk_token")
    vocabulary = {piece.text: index for index, piece in enumerate(model.pieces)}
    backend = Backend(models.WordLevel(vocabulary, unk_token=unknown or ""))
    pieces = _Pieces(path, model.add_dummy_prefix, only_first)
    backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(pieces)
    return backend


class _Pieces:
    """A step of the tokenizers library that splits a text into sentencepiece's pieces."""

    def __init__(self, path: Path, prefix: bool, only_first: bool) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ModelError(
                f"{path}: this model needs the sentencepiece library: pip install sentencepiece, "
                "or put a tokenizer.json beside it"
            ) from error
        content = path.read_bytes()
        try:
            bare = SentencePieceProcessor(model_proto=content + _NO_PREFIX)
            self._first = SentencePieceProcessor(model_proto=content) if prefix else bare
        except RuntimeError as error:
            raise ModelError(f"{path}: sentencepiece cannot read it: {error}") from error
        self._later = bare if only_first else self._first

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        """Split each part of a text that is no special token."""
        text.split(self._split)

    def _split(self, index: int, part: NormalizedString) -> list[NormalizedString]:
        encoder = self._later if index else self._first
        pieces = encoder.id_to_piece(encoder.encode(str(part)))
        return [NormalizedString(piece) for piece in pieces]


def _add_template(backend: Backend, model: SentencePieceModel, config: dict[str, Any]) -> None:
    """Add BOS in front, unless ``add_bos_token`` is false, and EOS behind if ``add_eos_token``."""
    parts: list[str] = ["$A"]
    ids: list[tuple[str, int]] = []
    for name, default in (("bos", True), ("eos", False)):
        token = config.get(f"{name}_token", model.special_tokens.get(f"{name}_token"))
        wanted = config.get(f"add_{name}_token")
        text = str(token["content"] if isinstance(token, dict) else token)
        index = None if token is None else backend.token_to_id(text)
        if index is not None and (default if wanted is None else wanted):
            parts = [text, *parts] if name == "bos" else [*parts, text]
            ids.append((text, index))
    if ids:
        both = [*parts, *(f"{part.replace('$A', '$B')}:1" for part in parts)]
        backend.post_processor = processors.TemplateProcessing(parts, both, ids)
