"""Find the model family of a folder: every module of ``families`` declares one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kiln.engine.errors import ModelError
from kiln.engine.models import families
from kiln.engine.models.config_keys import refuse_unknown_keys
from kiln.engine.models.family import Family, with_head
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import HFConfig, read_config
from kiln.engine.models.model_folder import ModelFiles, merged, model_vocab_size, read_json
from kiln.engine.models.quantization import read_quantization
from kiln.engine.models.refused_formats import gguf_advice
from kiln.engine.models.safetensors_weights import stored_dtype

_OF_ALL = ("architectures", "model_type", "eos_token_id", "tie_word_embeddings", "text_config")
_OUTER = ("dtype", "torch_dtype", "quantization_config")  # of a wrapper, for all of its parts


@cache
def known_families() -> MappingProxyType[str, Family]:
    """Return the family of each supported architecture."""
    known: dict[str, Family] = {}
    for module in sorted(found.name for found in pkgutil.iter_modules(families.__path__)):
        family: Family = importlib.import_module(f"{families.__name__}.{module}").FAMILY
        known.update(dict.fromkeys(family.architectures, family))
    return MappingProxyType(known)


def read_model(
    folder: Path, quantization: str | None = None, overrides: Mapping[str, Any] | None = None
) -> tuple[Family, HFConfig]:
    """Read a model folder's config.json.

    ``quantization``: what the user asked for; ``overrides``: what is merged into the file. Raises
    ModelError if the file is missing or malformed, or has an unsupported architecture or key;
    ConfigError if the weights are quantised otherwise than asked for.
    """
    path = folder / "config.json"
    if not path.is_file():
        advice = gguf_advice(folder)
        problem = advice or f"{folder} is not a model in Hugging Face format"
        raise ModelError(f"{path} is missing: {problem}")
    given = overrides or {}
    content = merged(read_json(path), given)
    outer = Fields(content, path, overrides=given)
    architecture, family, wrapped = _family(outer)
    images: frozenset[int] = frozenset()
    if wrapped:
        images = _image_tokens(outer, family)
        content, given = _text_part(content, family), _text_overrides(given, path)
        path = Path(f"{path} (text_config)")
    if content.get("dtype") is None and content.get("torch_dtype") is None:
        content = {**content, "dtype": stored_dtype(folder)}
    fields = Fields({**family.keys, **content}, path, names=family.names, overrides=given)
    refuse_unknown_keys(fields, {*family.keys, *family.ignored}, architecture)
    traits = family.traits(fields)
    quantized = read_quantization(fields, folder, quantization)
    return family, read_config(fields, traits, quantized, wrapped=wrapped, image_token_ids=images)


def vocabulary_size(files: ModelFiles) -> int:
    """Return how many tokens a model can draw: by config.json, or by the default of its family.

    Raises ModelError if that says nothing, or if the model is not supported.
    """
    size = model_vocab_size(files)
    return size or read_model(files.folder, overrides=files.overrides)[1].vocab_size


def _family(fields: Fields) -> tuple[str, Family, bool]:
    """Return the architecture, its family, and whether that is inside of a wrapper.

    A model is found by its name or by its type. Raises ModelError.
    """
    named, known = fields.texts("architectures"), known_families()
    for architecture in map(with_head, named):
        if architecture in known:
            return architecture, known[architecture], False
        inner = {one.model_type: one for one in known.values() if architecture in one.wrappers}
        if inner:
            text = fields.group("text_config") or fields.standing_for("text_config", {})
            kind = text.text("model_type", next(iter(inner)) if len(inner) == 1 else "")
            if kind not in inner:
                raise text.error("model_type", f"in {architecture} Kiln serves {', '.join(inner)}")
            return architecture, inner[kind], True
    wrappers = {name for one in known.values() for name in one.wrappers}
    wanted = f"Kiln serves {', '.join(sorted({*known, *wrappers}))}"
    if named:
        raise fields.error("architectures", wanted)
    model_type = fields.text("model_type", "")
    for architecture, family in known.items():
        if model_type and family.model_type == model_type:
            return architecture, family, False
    raise fields.error("architectures", f"and model_type is {model_type!r}: {wanted}")


def _image_tokens(outer: Fields, family: Family) -> frozenset[int]:
    """Return the tokens that stand for images in a wrapper. Raises ModelError.

    transformers reads ``image_token_id`` as another name of ``image_token_index``.
    """
    found = set()
    for name, default in family.image_tokens.items():
        other = name.removesuffix("_index") + "_id"
        found.add(outer.count(name if name in outer else other, default, least=0))
    return frozenset(found)


def _text_part(content: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the config of the text model in a wrapper's, which is all that transformers reads.

    The head may be tied at either level. A head of its own is used in any case, so it counts as
    tied where the file is silent.
    """
    outer = {name: content[name] for name in _OUTER if content.get(name) is not None}
    tied = content.get("tie_word_embeddings")
    text = dict(content.get("text_config") or {})
    for name in family.of_head:
        text.pop(name, None)
    return {
        **text,
        **outer,
        "tie_word_embeddings": True if tied is None else tied,
    }


def _text_overrides(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return what is merged into the config of the text model in a wrapper.

    Raises ModelError for a value that nothing would read.
    """
    for name in given:
        if name not in (*_OF_ALL, *_OUTER):
            wanted = "but of this model only the text part is served: put it into text_config"
            raise Fields(given, path, overrides=given).error(name, wanted)
    return {**given, **(given.get("text_config") or {})}
