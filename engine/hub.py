"""A model's folder from the Hugging Face hub: the copy on this machine first, then the network."""

from __future__ import annotations

import json
from pathlib import Path

from kiln.engine.errors import ModelError

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_INDEX = "model.safetensors.index.json"


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
        return Path(snapshot_download(model, allow_patterns=_WANTED))
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
        return Path(snapshot_download(model, allow_patterns=_WANTED, local_files_only=True))
    except (OSError, ValueError):
        return None


def _is_complete(folder: Path) -> bool:
    """Whether config.json and all the weights are there."""
    if not (folder / "config.json").exists():
        return False
    index = folder / _INDEX
    if not index.exists():
        return (folder / "model.safetensors").exists()
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, LookupError, AttributeError):  # not an index: fetch it again
        return False
    return all((folder / str(shard)).exists() for shard in shards)
