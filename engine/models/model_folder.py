"""Locate a model's folder and read its small JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kiln.engine.errors import ModelError
from kiln.engine.models.hub import download, has_tokenizer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where the files of a model are.

    ``overrides`` are merged into config.json. ``tokenizer`` is the folder of the tokenizer, None if
    that is in ``folder`` too.
    """

    folder: Path
    overrides: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Path | None = None

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer."""
        return self.tokenizer or self.folder


class ModelSettings(Protocol):
    """The part of the settings that says where the files of a model are."""

    @property
    def model(self) -> str:
        """A folder or a hub id."""

    @property
    def revision(self) -> str | None:
        """That of the model on the hub; None: the main branch."""

    @property
    def tokenizer(self) -> str | None:
        """A folder or a hub id; None: the model's own."""

    @property
    def tokenizer_revision(self) -> str | None:
        """That of the tokenizer on the hub; without ``tokenizer`` of the model."""

    @property
    def overrides(self) -> dict[str, Any]:
        """What is merged into config.json."""


def find_model_files(settings: ModelSettings) -> ModelFiles:
    """Return the files of a model; what this machine lacks is downloaded. Raises ModelError."""
    folder = resolve_model_folder(settings.model, settings.revision)
    revision = settings.tokenizer_revision
    if settings.tokenizer is None and revision is None:
        return ModelFiles(folder, settings.overrides)
    named = settings.tokenizer or settings.model
    tokenizer = resolve_model_folder(named, revision, weights=False)
    if not has_tokenizer(tokenizer):
        raise ModelError(
            f"tokenizer {named!r}: {tokenizer} has none: give a folder or a hub id with "
            "tokenizer.json or an older format"
        )
    return ModelFiles(folder, settings.overrides, tokenizer)


def resolve_model_folder(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the local folder of a model, given as a folder or as a hub id like ``org/name``.

    A hub id without a local copy is downloaded; ``weights`` as in ``hub.download``. Raises
    ModelError naming what is missing and what to do.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelError(
                f"revision {revision[:80]!r}: {model} is a folder, which has none: leave it out, "
                "or give a hub id"
            )
        return folder
    looks_like_path = folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1
    if folder.exists() or looks_like_path:
        raise ModelError(f"model {model!r}: no such folder, and not a hub id")
    return download(model, revision, weights=weights)


def read_model_config(files: ModelFiles) -> dict[str, Any]:
    """Return config.json with what is merged into it; empty without either. Raises ModelError."""
    return merged(read_json(files.folder / "config.json"), files.overrides)


def merged(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with the values of another; those that are objects are merged too."""
    made = dict(content)
    for name, value in overrides.items():
        own = made.get(name)
        both = isinstance(own, Mapping) and isinstance(value, Mapping)
        made[name] = merged(own, value) if both else value  # type: ignore[arg-type]
    return made


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


def model_vocab_size(files: ModelFiles) -> int | None:
    """Return how many tokens the model can draw, by config.json; None if it does not say."""
    config = read_model_config(files)
    size = text_config(config).get("vocab_size")
    size = config.get("vocab_size") if size is None else size
    return size if type(size) is int else None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model that a model wraps; empty without one."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else {}


def tekken_path(folder: Path) -> Path | None:
    """Return the tekken.json of a folder without another tokenizer, or None."""
    path = folder / "tekken.json"
    others = (folder / "tokenizer.json").exists() or sentencepiece_path(folder) is not None
    return path if path.is_file() and not others else None


def sentencepiece_path(folder: Path) -> Path | None:
    """Return the sentencepiece file of a folder without tokenizer.json, or None.

    A file of that name with tokens in base64, as of Llama 3, is none.
    """
    path = folder / "tokenizer.model"
    if (folder / "tokenizer.json").exists() or not path.is_file():
        return None
    with path.open("rb") as file:
        return path if file.read(1) == b"\n" else None  # the mark of the first piece
