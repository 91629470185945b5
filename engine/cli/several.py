"""Flags that take several words, and MODEL behind them.

argparse gives such a flag every word up to the next flag, so in ``--lora-modules a=b MODEL`` MODEL
too. Where a word cannot be a value of the flag, or is a model's folder, it is MODEL.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Fits = Callable[[str], bool]


class Several(argparse.Action):
    """Collects the words of a flag; a flag that is given twice has the words of both.

    ``fits`` says whether a word can be one of the values; None: any word can.
    """

    def __init__(self, *args: Any, fits: Fits | None = None, **options: Any) -> None:
        super().__init__(*args, **{"nargs": "+", **options})
        self.fits = fits

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add the values."""
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or ()), *values])


def is_pair_like(word: str) -> bool:
    """Whether a word can be NAME=PATH, a JSON object, or a wrong one that is not a path."""
    return "=" in word or word.startswith("{") or "/" not in word


def is_number(word: str) -> bool:
    """Whether a word is meant as a number, if only by its first character."""
    return not word[:1].isalpha() and "/" not in word


def is_origin_like(word: str) -> bool:
    """Whether a word can be ``*``, an origin, part of one, or a JSON list."""
    return "://" in word or "/" not in word


def is_model_folder(word: str) -> bool:
    """Whether a word is a folder with a config.json."""
    try:
        return (Path(word).expanduser() / "config.json").is_file()
    except (OSError, RuntimeError, ValueError):  # too long, no home, a null byte
        return False


def name_model(words: Sequence[str], several: Mapping[str, Fits | None]) -> list[str]:
    """Return the words with ``--model`` before the last value of a flag if it is MODEL.

    ``several``: the flags that take several words. The first word behind a flag is always its
    value. What is behind ``--`` stays as it is.
    """
    found: list[str] = []
    is_named = any(word.partition("=")[0] == "--model" for word in words)
    fits: Fits | None = None
    place = -1  # behind a flag that takes several words; -1: behind another word
    for word in (*words, "--"):
        if not word.startswith("-"):
            place += place >= 0
            found.append(word)
            continue
        if place > 1 and not is_named and _is_model(found[-1], fits):
            found.insert(-1, "--model")
            is_named = True
        if word == "--":
            break
        place, fits = (0, several[word]) if word in several else (-1, None)
        found.append(word)
    return [*found, *words[words.index("--") :]] if "--" in words else found


def _is_model(word: str, fits: Fits | None) -> bool:
    return is_model_folder(word) or (fits is not None and not fits(word))
