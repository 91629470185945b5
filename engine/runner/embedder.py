"""Whether a model folder is for embeddings, and how sentence-transformers makes them of it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kiln.engine.config import Task
from kiln.engine.errors import ModelError
from kiln.engine.models.family import with_head
from kiln.engine.models.model_folder import read_any_json, read_json
from kiln.engine.requests.pooling import Embedder, PoolingType

_ORDERS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_POOLINGS: MappingProxyType[str, PoolingType] = MappingProxyType(
    {"lasttoken": "LAST", "mean": "MEAN", "mean_tokens": "MEAN", "cls": "CLS", "cls_token": "CLS"}
)
_MODE = "pooling_mode"

logger = logging.getLogger(__name__)


def read_embedder(folder: Path, task: Task, hidden_size: int) -> Embedder | None:
    """Return how the model of a folder makes embeddings; None if it is to generate text.

    With the task "auto" it makes embeddings if the folder has the modules of sentence-transformers,
    or an architecture without a head. Without modules they are those of the last token, of length
    1, as in vLLM. Raises ModelError if modules ask for what Kiln lacks, or the model cannot
    generate.
    """
    named = read_json(folder / "config.json").get("architectures") or []
    headless = [name for name in named if isinstance(name, str) and with_head(name) != name]
    if task == "generate":
        if headless:
            raise ModelError(
                f"{folder / 'config.json'}: architectures is {headless}, a model without a head, "
                "which cannot generate text: serve it with --task embed"
            )
        return None
    modules = read_any_json(folder / "modules.json")
    if modules is not None:
        return _of_modules(folder, modules, hidden_size)
    return Embedder(hidden_size) if headless or task == "embed" else None


def _of_modules(folder: Path, modules: Any, hidden_size: int) -> Embedder:
    """Read the modules of sentence-transformers. Raises ModelError."""
    path = folder / "modules.json"
    try:
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        places = [str(module["path"]) for module in modules]
    except (KeyError, TypeError) as error:
        wanted = "want a list of modules, each with type and path"
        raise ModelError(f"{path}: is not sentence-transformers' ({error!r}): {wanted}") from error
    if kinds not in _ORDERS or places[0]:
        shown = ", ".join(map(" in ".join, zip(kinds, map(repr, places), strict=True)))[:200]
        raise ModelError(
            f"{path}: the modules are {shown}: Kiln supports Transformer in '', then Pooling, "
            "then Normalize or nothing; --task generate ignores them"
        )
    prompt = read_json(folder / "config_sentence_transformers.json").get("default_prompt_name")
    if prompt is not None:
        logger.warning("%s: the default prompt %r is not added to texts", folder, prompt)
    limits = read_json(folder / "sentence_bert_config.json")
    if limits.get("do_lower_case"):
        raise ModelError(
            f"{folder / 'sentence_bert_config.json'}: do_lower_case is true: Kiln tokenizes texts "
            "as they are"
        )
    most = limits.get("max_seq_length")
    if most is not None and not (type(most) is int and most > 0):
        raise ModelError(
            f"{folder / 'sentence_bert_config.json'}: max_seq_length is {str(most)[:80]!r}, want a "
            "count of tokens"
        )
    pooling = _pooling(folder / places[1] / "config.json")
    return Embedder(hidden_size, pooling, "Normalize" in kinds, most)


def _pooling(path: Path) -> PoolingType:
    """Return the one pooling mode of a Pooling module, by default the mean. Raises ModelError."""
    if not path.is_file():
        raise ModelError(f"{path} is missing: it says how hidden states become an embedding")
    config = read_json(path)
    named = config.get(_MODE)
    if named is None:
        flags = {f"{_MODE}_mean_tokens": True} | config
        on = [key for key, value in flags.items() if key.startswith(_MODE) and value]
        modes = [key.removeprefix(f"{_MODE}_") for key in on]
    else:
        modes = [named] if isinstance(named, str) else list(named)
    if config.get("include_prompt") is False:
        raise ModelError(f"{path}: include_prompt is false: Kiln pools the tokens of a whole text")
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelError(
            f"{path}: the pooling modes are {', '.join(map(str, modes))[:80] or 'none'}: Kiln has "
            "lasttoken, mean_tokens and cls_token, one at a time"
        )
    return _POOLINGS[modes[0]]
