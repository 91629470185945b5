"""The web pages that may use the API: the values of ``--allowed-origins``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import urlsplit

from kiln.engine.errors import ConfigError


def read_origins(given: Sequence[str]) -> tuple[str, ...]:
    """Return the origins of words, each an origin, ``*`` or a JSON list. Raises ConfigError."""
    found: list[str] = []
    for word in given:
        if not word.startswith("["):
            found.append(word)
            continue
        try:
            listed = json.loads(word)
        except ValueError as error:
            raise _wrong(word) from error
        if not all(isinstance(one, str) for one in listed):
            raise _wrong(word)
        found += listed
    for origin in found:
        if not _is_origin(origin):
            raise _wrong(origin)
    return tuple(dict.fromkeys(found))


def _is_origin(text: str) -> bool:
    """Whether a browser could send this; it compares the whole text."""
    if text in ("*", "null"):
        return True
    parts = urlsplit(text)
    return bool(parts.hostname) and text == f"{parts.scheme}://{parts.netloc}" and text.islower()


def _wrong(text: str) -> ConfigError:
    return ConfigError(
        f"--allowed-origins {text[:80]!r}: want '*', origins such as https://example.org without "
        "a path and in small letters, or a JSON list of them"
    )
