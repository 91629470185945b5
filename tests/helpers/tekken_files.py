"""Small tekken.json files, and the rule by which such a tokenizer splits a text."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
)
NUM_SPECIAL = 30
BYTES = tuple(bytes([byte]) for byte in range(256))
WORDS = (
    "th",
    "he",
    "the",
    " the",
    "in",
    "an",
    "hell",
    "ello",
    "hello",
    " w",
    "or",
    " wor",
    "日",
    "é",
)


def tekken(
    pieces: tuple[bytes, ...] = tuple(word.encode() for word in WORDS),
    version: str = "v3",
    special: tuple[str, ...] | None = SPECIAL_TOKENS,
) -> dict[str, Any]:
    """Return the content of a file with these pieces behind the single bytes."""
    every = (*BYTES, *pieces)
    listed = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(every)
    ]
    unused = {"rank": len(every), "token_bytes": "/////w==", "token_str": None}
    content: dict[str, Any] = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(every) + 1,
            "default_vocab_size": NUM_SPECIAL + len(every),
            "default_num_special_tokens": NUM_SPECIAL,
            "version": version,
        },
        "vocab": [*listed, unused],
    }
    if special is not None:
        content["special_tokens"] = [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ]
    return content


def write_tekken(folder: Path, **choices: Any) -> Path:
    """Write a tekken.json into a folder, which is returned."""
    (folder / "tekken.json").write_text(json.dumps(tekken(**choices)))
    return folder


def split(content: dict[str, Any], text: str) -> list[int]:
    """Return the token ids of a text without special tokens, by the rule of the format."""
    entries = content["vocab"][: content["config"]["default_vocab_size"] - NUM_SPECIAL]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}
    ids = []
    for part in regex.findall(content["config"]["pattern"], text):
        whole = part.encode()
        parts = [whole] if whole in ranks else [bytes([byte]) for byte in whole]
        while True:
            unions = [left + right for left, right in pairwise(parts)]
            known = [(ranks[union], at) for at, union in enumerate(unions) if union in ranks]
            if not known:
                break
            _, at = min(known)
            parts[at : at + 2] = [unions[at]]
        ids += [NUM_SPECIAL + ranks[one] for one in parts]
    return ids
