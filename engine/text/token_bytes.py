"""The bytes of each token, for the decoders that language models use.

A tokenizer decodes a list of tokens as one string, at the cost of the whole list for each new
token. But byte-level and metaspace decoders only concatenate bytes, so the bytes of each token are
enough to decode a stream exactly, one token at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

Piece = Callable[[str, bool], bytes]

_NFC_SHRINKS = 4  # at most this factor: 7 bytes become the 2 of U+0390
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_decoder(backend: Backend) -> Piece | None:
    """Return a function from a token to its bytes; None for an unsupported decoder.

    Its arguments are the token as in the vocabulary, and whether it starts the text: some decoders
    drop the space there.
    """
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    parts = {part["type"]: part for part in decoder.get("decoders", [decoder])}
    kinds = list(parts)
    if kinds == ["ByteLevel"]:
        return _byte_level(_byte_alphabet())
    if kinds == ["Metaspace"]:
        drops = parts["Metaspace"]["prepend_scheme"] != "never"
        return _metaspace(parts["Metaspace"]["replacement"], drops)
    if kinds[0] == "Replace" and set(kinds[1:]) <= {"ByteFallback", "Fuse", "Strip"}:
        return _replace(parts)
    return None


def byte_characters() -> dict[int, str]:
    """Return the character that stands for each byte in a byte-level vocabulary."""
    return {byte: char for char, byte in _byte_alphabet().items()}


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary.

    Printable Latin-1 characters encode themselves, those from U+0100 on the other bytes.
    Source: Radford et al. 2019 (GPT-2), ``bytes_to_unicode`` in its encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _byte_level(alphabet: dict[str, int]) -> Piece:
    def piece(form: str, first: bool) -> bytes:
        try:
            return bytes([alphabet[char] for char in form])
        except KeyError:  # an added token, stored as plain text
            return form.encode()

    return piece


def _metaspace(replacement: str, drops: bool) -> Piece:
    def piece(form: str, first: bool) -> bytes:
        return form.replace(replacement, "" if first and drops else " ").encode()

    return piece


def _replace(parts: dict[str, dict[str, Any]]) -> Piece | None:
    """Return Llama's decoder: ▁ becomes a space, <0xNN> a byte, the first space is stripped."""
    replaced, content = parts["Replace"]["pattern"].get("String"), parts["Replace"]["content"]
    strip = parts.get("Strip", {"content": " ", "start": 0, "stop": 0})
    if replaced is None or strip["content"] != " " or strip["start"] > 1 or strip["stop"] > 0:
        return None

    def piece(form: str, first: bool) -> bytes:
        match = _BYTE_TOKEN.fullmatch(form) if "ByteFallback" in parts else None
        known = bytes([int(match[1], 16)]) if match else form.replace(replaced, content).encode()
        return known.removeprefix(b" ") if first and strip["start"] else known

    return piece


def longest_token(backend: Backend) -> int | None:
    """Return an upper bound of the bytes of text per token; None if unbounded.

    A bound exists if every byte of the text is encoded. It does not if spaces are dropped, or if a
    run of unknown characters becomes one token.
    """
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    shrinks = _shrinks(_parts(backend.normalizer))
    if shrinks is None or not isinstance(model, models.BPE):
        return None
    if any(token.lstrip or token.rstrip or not token.content.isascii() for token in added):
        return None
    steps = _parts(backend.pre_tokenizer)
    by_bytes = "ByteLevel" in [step["type"] for step in steps]
    keeps = {"ByteLevel", "Metaspace", "Digits", "Split"}
    if any(s["type"] not in keeps or s.get("behavior") == "Removed" for s in steps):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    needed = _byte_alphabet() if by_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    prefixed = model.continuing_subword_prefix or model.end_of_word_suffix
    if prefixed or not (by_bytes or model.byte_fallback) or not vocabulary.keys() >= set(needed):
        return None
    return shrinks * max(len(form if by_bytes else form.encode()) for form in vocabulary)


def _parts(component: Any) -> list[dict[str, Any]]:
    """Return the settings of the steps of a normalizer or a pre-tokenizer."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    steps = state.get("normalizers") or state.get("pretokenizers") or [state]
    return [step for step in steps if step["type"] != "Sequence"]


def _shrinks(steps: list[dict[str, Any]]) -> int | None:
    """Return the largest factor by which a normalizer can shorten a text; None if unknown."""
    most = 1
    for step in steps:
        if step["type"] == "NFC":
            most *= _NFC_SHRINKS
        elif step["type"] == "Replace" and "String" in step["pattern"]:
            if len(step["content"].encode()) < len(step["pattern"]["String"].encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return most
