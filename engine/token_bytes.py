"""What bytes each token stands for, for the decoders that language models use.

A tokenizer decodes a list of tokens as one string, which costs the whole length for each new
token. Byte-level and metaspace decoders are concatenations of bytes, though, so the bytes of each
token are enough to decode a stream exactly, one token at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend

Piece = Callable[[str, bool], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_decoder(backend: Backend) -> Piece | None:
    """Return a function from a token to its bytes; None for an unfamiliar decoder.

    It takes the token's form in the vocabulary, and whether it begins the text: some decoders
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


def _byte_alphabet() -> dict[str, int]:
    """Return the character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on.
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
        except KeyError:  # an added token, written as it is
            return form.encode()

    return piece


def _metaspace(replacement: str, drops: bool) -> Piece:
    def piece(form: str, first: bool) -> bytes:
        return form.replace(replacement, "" if first and drops else " ").encode()

    return piece


def _replace(parts: dict[str, dict[str, Any]]) -> Piece | None:
    """Return the pieces of Llama's decoder: ▁ to space, bytes by name, one space stripped."""
    replaced, content = parts["Replace"]["pattern"].get("String"), parts["Replace"]["content"]
    strip = parts.get("Strip", {"content": " ", "start": 0, "stop": 0})
    if replaced is None or strip["content"] != " " or strip["start"] > 1 or strip["stop"] > 0:
        return None

    def piece(form: str, first: bool) -> bytes:
        match = _BYTE_TOKEN.fullmatch(form) if "ByteFallback" in parts else None
        known = bytes([int(match[1], 16)]) if match else form.replace(replaced, content).encode()
        return known.removeprefix(b" ") if first and strip["start"] else known

    return piece
