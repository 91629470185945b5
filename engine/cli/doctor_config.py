"""Read config.json, and go on behind each problem, so that all of them are found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kiln.engine.config import ModelConfig
from kiln.engine.errors import ConfigError
from kiln.engine.models.family import Family
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.model_folder import read_json
from kiln.engine.models.registry import read_model

_CONFIG, _TEXT = "config.json", "text_config"
_FIELD = re.compile(r"(?:config\.json|--hf-overrides)(?: \(text_config\))?: ([\w.]+) is ")
_MOST = 50  # problems


def read_with_problems(
    folder: Path, model: ModelConfig
) -> tuple[tuple[Family, HFConfig] | None, list[str]]:
    """Return what read_model does, or None and why Kiln refuses the config.

    ``model``: the settings of the model.
    A field that is refused is left out, and the rest is read again: from a folder of links.
    """
    try:
        return read_model(folder, model.quantization, model.overrides), []
    except ConfigError as error:
        problems = [str(error)]
    try:
        content = read_json(folder / _CONFIG)
    except ConfigError:
        return None, problems
    with TemporaryDirectory(prefix="kiln-doctor-") as parent:
        twin = Path(parent)
        for path in folder.iterdir():
            if path.name != _CONFIG:
                (twin / path.name).symlink_to(path.absolute())
        problem, dropped, overrides = problems[0], set[str](), model.overrides
        while len(problems) < _MOST and _drop((content, overrides), problem, dropped):
            (twin / _CONFIG).write_text(json.dumps(content), encoding="utf-8")
            try:
                read_model(twin, model.quantization, overrides)
                break
            except ConfigError as error:
                problem = str(error).replace(str(twin), str(folder))
            if _field(problem) not in dropped:
                problems.append(problem)
    return None, problems


def _field(problem: str) -> str:
    """Return the field that a message is about, empty if it is about something else."""
    found = _FIELD.search(problem)
    if found is None:
        return ""
    return f"{_TEXT}.{found[1]}" if f"({_TEXT})" in problem else found[1]


def _drop(contents: Iterable[dict[str, Any]], problem: str, dropped: set[str]) -> bool:
    """Leave out the field that a problem is about, or the group that it was in; say if it could."""
    place = _field(problem)
    while place in dropped:
        place = place.rpartition(".")[0]
    dropped.add(place)
    return any([_pop(content, place) for content in contents])


def _pop(content: dict[str, Any], place: str) -> bool:
    *groups, name = place.split(".")
    for group in groups:
        inner = content.get(group)
        if not isinstance(inner, dict):
            return False
        content = inner
    return content.pop(name, None) is not None
