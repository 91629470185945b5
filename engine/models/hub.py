"""Model folders from the Hugging Face hub: the local copy if complete, else a download."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from kiln.engine.errors import ModelError

_SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]
INDEX = "model.safetensors.index.json"  # of weights in several files
SINGLE = "model.safetensors"


def download(model: str) -> Path:
    """Return the folder of a hub id such as ``org/name``.

    A complete local copy is used without network access. Raises ModelError with two lines: what is
    wrong, and what to do.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    local: Path | None = None  # complete or not
    with suppress(OSError, ValueError):
        local = Path(snapshot_download(model, local_files_only=True))
    if local is not None and _is_complete(local):
        return local
    try:
        # Weights by file name: a repository may also hold other formats, such as Mistral's
        # consolidated.safetensors.
        small = Path(snapshot_download(model, allow_patterns=_SMALL))
        weights = _weights(small) or {SINGLE}
        return Path(snapshot_download(model, allow_patterns=[*_SMALL, *sorted(weights)]))
    except RepositoryNotFoundError as error:  # also for gated repositories
        raise ModelError(
            f"model {model!r}: no such folder, and no such model on the hub that you can access\n"
            f"check the spelling; for a gated model set HF_TOKEN"
        ) from error
    except (OSError, ValueError) as error:  # the hub's and the network's errors are OSErrors
        if local is not None:
            return local  # if a file is missing, reading it raises an error with its name
        reason = str(error).strip().partition("\n")[0][:200]
        raise ModelError(
            f"model {model!r}: no such folder, and the hub cannot provide it ({reason})\n"
            f"give a folder with config.json and *.safetensors, or run `hf download {model}` "
            f"on a machine with network access"
        ) from error


def _is_complete(folder: Path) -> bool:
    """Whether config.json and all weight files exist."""
    weights = _weights(folder)
    return bool(weights) and all((folder / name).exists() for name in ("config.json", *weights))


def _weights(folder: Path) -> set[str]:
    """Return the names of the weight files; empty if their index is unreadable."""
    index = folder / INDEX
    if not index.exists():
        return {SINGLE}
    try:
        return {
            str(f) for f in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        }
    except (ValueError, LookupError, AttributeError, TypeError):
        return set()
