"""The tokenizers library's tokenizer of a folder, from the files of every format.

``tokenizer.json`` is read with the tokenizers library, the Rust code that transformers also calls.
This avoids the two seconds of importing transformers, which is used only to convert older formats,
but for files of sentencepiece and tekken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kiln.engine.errors import ModelError
from kiln.engine.models.hub import has_tokenizer
from kiln.engine.models.model_folder import read_json, sentencepiece_path, tekken_path
from kiln.engine.models.sentencepiece_file import read_sentencepiece
from kiln.engine.models.tekken_file import BOS, EOS, read_tekken
from kiln.engine.text.sentencepiece_tokenizer import sentencepiece_backend
from kiln.engine.text.tekken_tokenizer import tekken_backend

_SPECIAL_NAMES = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


def read_tokenizer(folder: Path) -> tuple[Backend, dict[str, Any]]:
    """Return a folder's tokenizer, and its tokenizer_config.json with what its format implies.

    Raises ModelError if files are missing or unreadable.
    """
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # written by transformers before 4.33
        config |= read_json(folder / "special_tokens_map.json")
    sentencepiece, tekken = sentencepiece_path(folder), tekken_path(folder)
    if sentencepiece is not None:
        model = read_sentencepiece(sentencepiece)
        config = {**model.special_tokens, **config}
        backend = sentencepiece_backend(model, sentencepiece, config)
    elif tekken is not None:
        backend = tekken_backend(read_tekken(tekken), tekken)
        config = {"bos_token": BOS, "eos_token": EOS, **config}
    else:
        backend = _backend(folder)
    _add_missing_tokens(backend, folder, config)
    if sentencepiece is None and tekken is None:
        _set_prefix_space(backend, config)
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    return backend, config


def special_texts(config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that a tokenizer_config.json names."""
    return {name: token.content for name, token in _special_tokens(config).items()}


def _backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.exists():
        return _converted(folder)
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the Rust library raises Exception itself
        raise ModelError(f"{path}: cannot be read ({error}): is it complete?") from error


def _converted(folder: Path) -> Backend:
    """Convert an older tokenizer format with transformers."""
    if not has_tokenizer(folder):
        raise ModelError(
            f"{folder}: no tokenizer (tokenizer.json or an older format): copy it from the "
            "original model, or use prompts of token ids"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise ModelError(f"{folder}: transformers cannot load its tokenizer: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ModelError(f"{folder}: its tokenizer {type(tokenizer).__name__} has no fast version")
    return backend


def _special_tokens(config: dict[str, Any]) -> dict[str, AddedToken]:
    """Return the named special tokens: ``bos_token`` and so on, and model-specific ones."""
    extra = config.get("extra_special_tokens")
    own = {name: token for name, token in config.items() if name.endswith("_token")}
    named = {**dict.fromkeys(_SPECIAL_NAMES), **own, **(extra if isinstance(extra, dict) else {})}
    tokens = {name: _special_token(value) for name, value in named.items()}
    return {name: token for name, token in tokens.items() if token is not None}


def _extra_special_tokens(config: dict[str, Any]) -> list[AddedToken]:
    """Return the unnamed special tokens."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    tokens = [_special_token(value) for value in extra or [] if not isinstance(extra, dict)]
    return [token for token in tokens if token is not None]


def _special_token(value: object) -> AddedToken | None:
    """Parse a string or an object; None for a flag such as ``add_bos_token: true``."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if not isinstance(value, dict) or "content" not in value:
        return None
    fields = {name: v for name, v in value.items() if name not in ("__type", "special")}
    return AddedToken(**fields, special=True)


def _add_missing_tokens(backend: Backend, folder: Path, config: dict[str, Any]) -> None:
    """Add the tokens of the files beside tokenizer.json, in the order of transformers.

    First those of ``added_tokens_decoder``, else of added_tokens.json, in the order of their ids.
    They replace those of tokenizer.json. Other special tokens follow.
    """
    special = [*_special_tokens(config).values(), *_extra_special_tokens(config)]
    known = backend.get_added_tokens_decoder()
    if "added_tokens_decoder" in config:
        written = config["added_tokens_decoder"].items()
        listed = {int(index): AddedToken(**token) for index, token in written}
    else:
        names = {token.content for token in special}
        listed = {
            index: AddedToken(text, normalized=text not in names, special=text in names)
            for text, index in read_json(folder / "added_tokens.json").items()
            if index not in known
        }
    tokens = [listed[index] for index in sorted(listed)]
    seen = {token.content for token in (*known.values(), *tokens)}
    for token in special:
        if token.content not in seen:
            seen.add(token.content)
            tokens.append(token)
    backend.add_tokens(tokens)


def _set_prefix_space(backend: Backend, config: dict[str, Any]) -> None:
    """Apply ``add_prefix_space`` for the three tokenizer classes for which transformers does."""
    wanted = config.get("add_prefix_space")
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    if kind == "LlamaTokenizer" and wanted is False and not _byte_level(backend):
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(parts)
    if kind in ("GPT2Tokenizer", "Qwen2Tokenizer") and isinstance(wanted, bool):
        for part in _byte_level(backend):
            part.add_prefix_space = wanted


def _byte_level(backend: Backend) -> list[Any]:
    """Return the byte-level steps of the pre-tokenizer."""
    step = backend.pre_tokenizer
    steps = list(cast(Any, step)) if isinstance(step, pre_tokenizers.Sequence) else [step]
    return [step for step in steps if isinstance(step, pre_tokenizers.ByteLevel)]
