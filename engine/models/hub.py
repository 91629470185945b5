"""Model folders from the Hugging Face hub: the local copy if complete, else a download."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from kiln.engine.errors import ModelError

_SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]
INDEX = "model.safetensors.index.json"  # of weights in several files
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    "spiece.model",
)


def download(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the folder of a hub id such as ``org/name``.

    ``revision``: a branch, a tag or a commit; None: the main branch. With ``weights`` false only
    the small files are fetched, such as those of a tokenizer. A complete local copy is used without
    network access. Raises ModelError with two lines: what is wrong, and what to do.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    local: Path | None = None  # complete or not
    with suppress(OSError, ValueError):
        local = Path(snapshot_download(model, revision=revision, local_files_only=True))
    if local is not None and (_is_complete(local) if weights else has_tokenizer(local)):
        return local
    try:
        # Weights by file name: a repository may also hold other formats, such as Mistral's
        # consolidated.safetensors.
        small = Path(snapshot_download(model, revision=revision, allow_patterns=_SMALL))
        if not weights:
            return small
        needed = [*_SMALL, *sorted(_weights(small) or {SINGLE})]
        return Path(snapshot_download(model, revision=revision, allow_patterns=needed))
    except RevisionNotFoundError as error:
        raise ModelError(
            f"model {model!r}: the hub has no revision {str(revision)[:80]!r} of it\n"
            "give a branch, a tag or a commit of its repository, or leave the revision out"
        ) from error
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


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer in any known format."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


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
