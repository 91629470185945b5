"""A model's folder from the Hugging Face hub: the copy on this machine first, then the network."""

from __future__ import annotations

import json
from pathlib import Path

from kiln.engine.errors import ModelError

_SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def download(model: str) -> Path:
    """Return the folder of a hub id such as ``org/name``.

    A complete copy on this machine is taken as it is, without a word to the network. Raises
    ModelError in two lines: what is wrong, and what to do.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    local = _local(model)
    if local is not None and _is_complete(local):
        return local
    try:
        # The weights by name: a repository may hold them in other formats too, such as Mistral's
        # consolidated.safetensors.
        small = Path(snapshot_download(model, allow_patterns=_SMALL))
        weights = _weights(small) or {_SINGLE}
        return Path(snapshot_download(model, allow_patterns=[*_SMALL, *sorted(weights)]))
    except RepositoryNotFoundError as error:  # a gated one too
        raise ModelError(
            f"model {model!r}: no folder here, and the hub has no such model for you\n"
            f"check the spelling; for a gated model set HF_TOKEN"
        ) from error
    except (OSError, ValueError) as error:  # the hub's and the network's errors are OSErrors
        if local is not None:
            return local  # what is missing in it, if anything, is named when it is read
        reason = str(error).strip().partition("\n")[0][:200]
        raise ModelError(
            f"model {model!r}: neither a folder here nor to be had from the hub ({reason})\n"
            f"give a folder with config.json and *.safetensors, or run `hf download {model}` "
            f"where there is a network"
        ) from error


def _local(model: str) -> Path | None:
    """Return this machine's copy, complete or not."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):
        return None


def _is_complete(folder: Path) -> bool:
    """Whether config.json and all the weights are there."""
    weights = _weights(folder)
    return bool(weights) and all((folder / name).exists() for name in ("config.json", *weights))


def _weights(folder: Path) -> set[str]:
    """Return the names of the weights' files; none where the index of them is not readable."""
    index = folder / _INDEX
    if not index.exists():
        return {_SINGLE}
    try:
        return {
            str(f) for f in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        }
    except (ValueError, LookupError, AttributeError, TypeError):
        return set()
