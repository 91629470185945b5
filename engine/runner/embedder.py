"""Whether a model folder is for embeddings, and how sentence-transformers makes them of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kiln.engine.config import Task
from kiln.engine.errors import ModelError
from kiln.engine.models.family import with_head
from kiln.engine.models.model_folder import (
    ModelFiles,
    read_any_json,
    read_json,
    read_model_config,
)
from kiln.engine.requests.pooling import Embedder, PoolingType

_ORDERS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_POOLINGS: MappingProxyType[str, PoolingType] = MappingProxyType(
    {"lasttoken": "LAST", "mean": "MEAN", "mean_tokens": "MEAN", "cls": "CLS", "cls_token": "CLS"}
)
_MODE, _TASK = "pooling_mode", "feature-extraction"

logger = logging.getLogger(__name__)


def read_embedder(
    folder: Path, task: Task, hidden_size: int, overrides: Mapping[str, Any] | None = None
) -> Embedder | None:
    """Return how the model of a folder makes embeddings; None if it is to generate text.

    ``overrides`` are merged into config.json.

    With the task "auto" it makes embeddings if the folder has the modules of sentence-transformers,
    or an architecture without a head. Without modules they are those of the last token, of length
    1, as in vLLM. Raises ModelError if modules ask for what Kiln lacks, or the model cannot
    generate.
    """
    named = read_model_config(ModelFiles(folder, overrides or {})).get("architectures") or []
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
    pooling = _pooling(folder / places[1] / "config.json")
    return Embedder(hidden_size, pooling, "Normalize" in kinds)


def longest_text(folder: Path, max_positions: int) -> int:
    """Return how many tokens of a text sentence-transformers uses.

    Raises ModelError if its Transformer module does more than to tokenize and run the model.
    """
    if not (folder / "modules.json").exists():
        return max_positions
    path = folder / "sentence_bert_config.json"
    config = read_json(path)
    if config.get("do_lower_case"):
        raise ModelError(f"{path}: do_lower_case is true: Kiln tokenizes texts as they are")
    task = config.get("transformer_task", _TASK)
    if task != _TASK:
        raise ModelError(f"{path}: transformer_task is {str(task)[:80]!r}: Kiln has {_TASK}")
    most = config.get("max_seq_length")
    if most is None:
        most = read_json(folder / "tokenizer_config.json").get("model_max_length")
        if type(most) is not int or most <= 0:  # "no limit" has several forms
            return max_positions
    if type(most) is not int or most <= 0:
        raise ModelError(f"{path}: max_seq_length is {str(most)[:80]!r}, want a count of tokens")
    return min(most, max_positions)


def _pooling(path: Path) -> PoolingType:
    """Return the one mode of a Pooling module. Raises ModelError.

    Older files have a flag for each mode, newer ones its name. The default is the mean.
    """
    if not path.is_file():
        raise ModelError(f"{path} is missing: it says how hidden states become an embedding")
    config = read_json(path)
    flags = [key for key, value in config.items() if key.startswith(f"{_MODE}_") and value]
    named = config.get(_MODE, [key.removeprefix(f"{_MODE}_") for key in flags] or "mean")
    modes = [str(mode) for mode in (named if isinstance(named, list) else [named])]
    if config.get("include_prompt") is False:
        raise ModelError(f"{path}: include_prompt is false: Kiln pools the tokens of a whole text")
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelError(
            f"{path}: the pooling modes are {', '.join(modes)[:80] or 'none'}: Kiln has "
            f"{', '.join(_POOLINGS)}, one at a time"
        )
    return _POOLINGS[modes[0]]
