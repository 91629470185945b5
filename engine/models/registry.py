"""Find the model family of a folder: every module of ``families`` declares one."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from types import MappingProxyType

from kiln.engine.errors import ModelError
from kiln.engine.models import families
from kiln.engine.models.config_keys import refuse_unknown_keys
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import HFConfig, read_config
from kiln.engine.models.model_folder import read_json


@cache
def known_families() -> MappingProxyType[str, Family]:
    """Return the family of each supported architecture."""
    known: dict[str, Family] = {}
    for module in sorted(found.name for found in pkgutil.iter_modules(families.__path__)):
        family: Family = importlib.import_module(f"{families.__name__}.{module}").FAMILY
        known.update(dict.fromkeys(family.architectures, family))
    return MappingProxyType(known)


def read_model(folder: Path) -> tuple[Family, HFConfig]:
    """Read a model folder's config.json.

    Raises ModelError if it is missing or malformed, or if it has an unsupported architecture or
    key.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing: {folder} is not a model in Hugging Face format")
    content = read_json(path)
    fields = Fields(content, path)
    for architecture in fields.texts("architectures"):
        family = known_families().get(architecture)
        if family is not None:
            fields = Fields({**family.keys, **content}, path)
            refuse_unknown_keys(fields, family.keys, architecture)
            return family, read_config(fields, architecture, family.traits(fields))
    raise fields.error("architectures", f"Kiln serves {', '.join(sorted(known_families()))}")
