"""Recorded conversations in the form of ShareGPT: a JSON list, each with its turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kiln.engine.bench.datasets import Sample
from kiln.engine.errors import ConfigError

_SHAPE = '[{"conversations": [{"from": …, "value": "text"}, …]}, …]'


def read_turns(path: Path, count_tokens: Callable[[str], int]) -> list[Sample]:
    """Return the first question of each conversation, with the tokens of its first answer.

    Conversations of fewer than two turns are left out, as vLLM's benchmark does. Raises ConfigError
    if the file cannot be read, or has another form.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # also UnicodeDecodeError
        raise _error(path, f"is not JSON ({error})") from error
    if not isinstance(content, list):
        raise _error(path, f"is not a list, but {_shown(content)}; want {_SHAPE}")
    turns = []
    for index, entry in enumerate(content):
        pair = _first_pair(path, index, entry)
        if pair is not None:
            question, answer = pair
            turns.append(Sample(question, count_tokens(question), count_tokens(answer)))
    return turns


def _first_pair(path: Path, index: int, entry: Any) -> tuple[str, str] | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise _error(path, f"entry {index} has no list of conversations: {_shown(entry)}")
    if len(turns) < 2:
        return None
    texts = []
    for number, turn in enumerate(turns[:2]):
        text = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(text, str):
            raise _error(path, f"entry {index}, turn {number} has no value: {_shown(turn)}")
        texts.append(text)
    return texts[0], texts[1]


def _error(path: Path, what: str) -> ConfigError:
    return ConfigError(f"--dataset-path {path}: {what}")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"
