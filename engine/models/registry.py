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
from kiln.engine.models.family import Family, with_head
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import HFConfig, read_config
from kiln.engine.models.model_folder import read_json
from kiln.engine.models.quantization import read_quantization
from kiln.engine.models.refused_formats import gguf_advice
from kiln.engine.models.safetensors_weights import stored_dtype


@cache
def known_families() -> MappingProxyType[str, Family]:
    """Return the family of each supported architecture."""
    known: dict[str, Family] = {}
    for module in sorted(found.name for found in pkgutil.iter_modules(families.__path__)):
        family: Family = importlib.import_module(f"{families.__name__}.{module}").FAMILY
        known.update(dict.fromkeys(family.architectures, family))
    return MappingProxyType(known)


def read_model(folder: Path, quantization: str | None = None) -> tuple[Family, HFConfig]:
    """Read a model folder's config.json.

    ``quantization``: what the user asked for. Raises ModelError if the file is missing or
    malformed, or has an unsupported architecture or key; ConfigError if the weights are quantised
    otherwise than asked for.
    """
    path = folder / "config.json"
    if not path.is_file():
        advice = gguf_advice(folder)
        problem = advice or f"{folder} is not a model in Hugging Face format"
        raise ModelError(f"{path} is missing: {problem}")
    content = read_json(path)
    fields = Fields(content, path)
    architecture = _architecture(fields)
    family = known_families()[architecture]
    if content.get("dtype") is None and content.get("torch_dtype") is None:
        content = {**content, "dtype": stored_dtype(folder)}
    fields = Fields({**family.keys, **content}, path, names=family.names)
    refuse_unknown_keys(fields, {*family.keys, *family.ignored}, architecture)
    traits = family.traits(fields)
    return family, read_config(fields, traits, read_quantization(fields, folder, quantization))


def _architecture(fields: Fields) -> str:
    """Return the supported architecture, by its name or by the model type. Raises ModelError."""
    named, known = fields.texts("architectures"), known_families()
    for architecture in map(with_head, named):
        if architecture in known:
            return architecture
    wanted = f"Kiln serves {', '.join(sorted(known))}"
    if named:
        raise fields.error("architectures", wanted)
    model_type = fields.text("model_type", "")
    for architecture, family in known.items():
        if model_type and family.model_type == model_type:
            return architecture
    raise fields.error("architectures", f"and model_type is {model_type!r}: {wanted}")
