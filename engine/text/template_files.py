"""The chat templates in a model's folder, by name, in every form in which folders have them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kiln.engine.errors import ModelError
from kiln.engine.models.model_folder import read_json

DEFAULT, FOR_TOOLS = "default", "tool_use"
_FILE, _FOLDER, _OLD_FILE = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
_CONFIG = "tokenizer_config.json"


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a folder's templates; ``config`` is its tokenizer_config.json.

    As in transformers, template files replace those of the config. A folder without both may have
    the file of a processor, which the tokenizers of wrapped language models share. Raises
    ModelError for what is no template.
    """
    files = {path.stem: path for path in (folder / _FOLDER).glob("*.jinja")}
    if (folder / _FILE).exists():
        files[DEFAULT] = folder / _FILE
    if files:
        return {name: _text(path) for name, path in sorted(files.items())}
    given, where = config.get("chat_template"), folder / _CONFIG
    if given is None:
        given, where = read_json(folder / _OLD_FILE).get("chat_template"), folder / _OLD_FILE
    if isinstance(given, str):
        return {DEFAULT: given}
    try:
        entries = given.items() if isinstance(given, Mapping) else map(_named, given or [])
        pairs = list(entries)
    except (TypeError, KeyError):
        pairs = [("", None)]
    if not all(isinstance(part, str) for pair in pairs for part in pair):
        raise ModelError(
            f"{where}: chat_template is {str(given)[:80]!r}, want a text, or a list of objects "
            "with name and template"
        )
    return dict(pairs)


def _named(entry: Any) -> tuple[Any, Any]:
    return entry["name"], entry["template"]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read ({error}): is it complete?") from error
