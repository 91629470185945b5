"""Read a sentencepiece model file, a protobuf message, without the protobuf library.

Only the fields that decide how text is encoded are read.
Source: ``sentencepiece_model.proto`` of google/sentencepiece, for the numbers of the fields.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from kiln.engine.errors import ModelError

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # the wire types of protobuf

Value = int | bytes


class Kind(IntEnum):
    """What a piece is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # never found in text, such as <s>
    USER_DEFINED = 4  # found in text before any other piece
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry of the vocabulary; its token id is its place in the list."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """A vocabulary, and how text is normalised before it is split into pieces."""

    pieces: tuple[Piece, ...]
    is_bpe: bool  # else unigram
    byte_fallback: bool
    special_tokens: dict[str, str]  # "unk_token", "bos_token" and "eos_token", if there are any
    add_dummy_prefix: bool  # a space in front of every text
    edits_text: bool  # replaces characters or drops spaces, before it splits


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Return the model of a file. Raises ModelError if it is broken or of an unsupported type."""
    try:
        return _model(path.read_bytes(), path)
    except (IndexError, ValueError, TypeError, KeyError, struct.error) as error:
        raise ModelError(
            f"{path}: cannot be read as a sentencepiece model ({error}): is it complete?"
        ) from error


def _model(content: bytes, path: Path) -> SentencePieceModel:
    pieces: list[Piece] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    for number, value in _fields(content):
        if number == 1:
            pieces.append(_piece(dict(_fields(value))))
        elif number == 2:
            trainer |= _fields(value)
        elif number == 3:
            normalizer |= _fields(value)
    if not trainer or not normalizer:
        raise ValueError("it ends before its settings")
    kind = _number(trainer, 3, 1)
    if not pieces or kind not in (1, 2):
        raise ModelError(
            f"{path}: {len(pieces)} pieces, model type {kind}: want a sentencepiece model of type "
            "unigram (1) or bpe (2)"
        )
    ids = {
        name: _number(trainer, field, default)
        for name, field, default in (("unk", 40, 0), ("bos", 41, 1), ("eos", 42, 2))
    }
    suffix, escape, squash = trainer.get(24, 0), normalizer.get(5, 1), normalizer.get(4, 1)
    return SentencePieceModel(
        pieces=tuple(pieces),
        is_bpe=kind == 2,
        byte_fallback=bool(trainer.get(35, 0)),
        special_tokens={
            f"{name}_token": pieces[at].text
            for name, at in ids.items()
            if at < len(pieces)  # -1, for none, is a large number here
        },
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        edits_text=bool(normalizer.get(2) or squash or suffix or not escape),
    )


def _piece(fields: dict[int, Value]) -> Piece:
    text, score = fields.get(1), fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("a piece without a text, or with a score that is no float")
    return Piece(text.decode(), struct.unpack("<f", score)[0], Kind(_number(fields, 3, 1)))


def _number(fields: dict[int, Value], field: int, default: int) -> int:
    value = fields.get(field, default)
    if not isinstance(value, int):
        raise ValueError(f"field {field} is {value[:20]!r}, not a number")
    return value


def _fields(message: Value) -> Iterator[tuple[int, Value]]:
    """Yield the number and the value of each field; a negative integer is one of 64 bits."""
    if isinstance(message, int):
        raise ValueError("a number where a message should be")
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        value: Value
        if wire == _VARINT:
            value, at = _varint(message, at)
        else:
            if wire == _BYTES:
                size, at = _varint(message, at)
            else:
                size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}[wire]
            value = message[at : at + size]
            if len(value) != size:
                raise ValueError("the file ends within a field")
            at += size
        yield number, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return an integer of 7 bits a byte, lowest first, and the place behind it."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("an integer of more than 64 bits")
