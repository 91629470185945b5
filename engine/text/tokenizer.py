"""The model's tokenizer: text to tokens and back, and chats to tokens.

``tokenizer.json`` is read with the tokenizers library, the Rust code that transformers also calls.
This avoids the two seconds of importing transformers, which is used only to convert older formats,
but for files of sentencepiece.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kiln.engine.errors import ModelError, RequestError
from kiln.engine.models.hub import has_tokenizer
from kiln.engine.models.model_folder import (
    ModelFiles,
    eos_token_ids,
    model_vocab_size,
    read_json,
    sentencepiece_path,
)
from kiln.engine.models.sentencepiece_file import read_sentencepiece
from kiln.engine.requests.sampling_params import check_surrogates
from kiln.engine.text.chat_template import ChatTemplate, template_text
from kiln.engine.text.sentencepiece_tokenizer import sentencepiece_backend
from kiln.engine.text.template_files import DEFAULT, FOR_TOOLS, read_templates
from kiln.engine.text.template_forms import Message
from kiln.engine.text.token_bytes import longest_token, piece_decoder

_MAX_SHOWN = 200  # characters of names
_SPECIAL_NAMES = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


class Tokenizer:
    """A model's tokenizer with its chat template."""

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
        eos_ids: frozenset[int] = frozenset(),
        model_vocab_size: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = special_tokens or {}
        self.eos_token_ids = eos_ids
        self._model_vocab_size = sys.maxsize if model_vocab_size is None else model_vocab_size
        self._templates = {
            name: ChatTemplate(source, self.special_tokens)
            for name, source in (chat_templates or {}).items()
        }
        self._piece = piece_decoder(backend)
        self._bytes: dict[tuple[int, bool], bytes] = {}

    @classmethod
    def load(cls, files: ModelFiles | Path, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model, with another chat template if one is given.

        ``files`` may be the folder alone. Raises ModelError if the tokenizer is missing or
        unreadable, ConfigError for the chat template.
        """
        files = files if isinstance(files, ModelFiles) else ModelFiles(files)
        folder = files.tokenizer_folder
        config = read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # written by transformers before 4.33
            config |= read_json(folder / "special_tokens_map.json")
        path = sentencepiece_path(folder)
        if path is None:
            backend = _backend(folder)
        else:
            model = read_sentencepiece(path)
            config = {**model.special_tokens, **config}
            backend = sentencepiece_backend(model, path, config)
        _add_missing_tokens(backend, folder, config)
        if path is None:
            _set_prefix_space(backend, config)
        templates = read_templates(folder, config)
        if chat_template is not None:
            templates = {DEFAULT: template_text(chat_template, templates)}
        backend.encode_special_tokens = config.get("split_special_tokens") is True
        return cls(
            backend,
            special_tokens={name: token.content for name, token in _special_tokens(config).items()},
            chat_templates=templates,
            eos_ids=eos_token_ids(files),
            model_vocab_size=model_vocab_size(files),
        )

    @classmethod
    def load_if_present(
        cls, files: ModelFiles | Path, chat_template: str | None = None
    ) -> Tokenizer | None:
        """Load a model's tokenizer; None without one, for serving token ids only."""
        folder = files.tokenizer_folder if isinstance(files, ModelFiles) else files
        return cls.load(files, chat_template) if has_tokenizer(folder) else None

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The token ids that ``skip_special_tokens`` removes from the text."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the special tokens with one of these texts, of those that the model can draw."""
        found = map(self.special_id, texts)
        return frozenset(token for token in found if token is not None)

    def special_id(self, text: str) -> int | None:
        """Return the special token with this text, if there is one that the model can draw."""
        return self._special_texts.get(text)

    @cached_property
    def _special_texts(self) -> dict[str, int]:
        added = self.backend.get_added_tokens_decoder().items()
        size = self._model_vocab_size
        return {token.content: index for index, token in added if token.special and index < size}

    @cached_property
    def _longest_token(self) -> int | None:
        return longest_token(self.backend)

    @property
    def vocab_size(self) -> int:
        """The number of tokens with added ones; the model's embedding may be larger."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def chat_template_sources(self) -> list[str]:
        """The texts of the chat templates; empty if there are none."""
        return [template.source for template in self._templates.values()]

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with BOS and the like if ``add_special_tokens``.

        Calls ``encode_batch_fast``, because ``encode`` holds the GIL during all its work. Raises
        RequestError if the text has half of a surrogate pair.
        """
        check_surrogates(text, "the prompt", "prompt")
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def surely_exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether a text must have more than ``num_tokens`` tokens, judged without tokenizing."""
        longest = self._longest_token
        size = len(text.encode(errors="surrogatepass"))
        return longest is not None and size > longest * num_tokens

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; unknown ids are skipped."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int, first: bool = False) -> bytes | None:
        """Return the bytes that one token adds to a text; None for an unsupported decoder.

        ``first``: the token starts the text; some decoders drop its leading space.
        """
        if self._piece is None:
            return None
        known = self._bytes.get((token_id, first))
        if known is None:
            form = self.backend.id_to_token(token_id)
            known = b"" if form is None else self._piece(form, first)
            self._bytes[token_id, first] = known
        return known

    def token_text(self, token_id: int) -> str:
        """Return one token as text, with its leading space; U+FFFD for part of a character."""
        known = self.token_bytes(token_id)
        if known is None:
            return self.decode([token_id], skip_special_tokens=False)
        return known.decode("utf-8", errors="replace")

    def token_forms(self, token_ids: list[int]) -> list[str]:
        """Return the tokens as they stand in the vocabulary; "" for an unknown id."""
        return [self.backend.id_to_token(token) or "" for token in token_ids]

    def chat_template(self, *, with_tools: bool = False) -> ChatTemplate:
        """Return the model's chat template; some models have one of its own for tools.

        Raises RequestError if the model has none.
        """
        name = FOR_TOOLS if with_tools and FOR_TOOLS in self._templates else DEFAULT
        if name not in self._templates:
            named = ", ".join(self._templates)[:_MAX_SHOWN]
            problem = f"only templates named {named}: choose one by --chat-template"
            problem = problem if named else "no chat template: send a prompt to completions instead"
            raise RequestError(f"the model has {problem}", "messages")
        return self._templates[name]

    def other_template(self, chat_template: str) -> ChatTemplate:
        """Return a template by its name, or one that is given as a file or as text.

        Raises ConfigError or ModelError.
        """
        named = {name: template.source for name, template in self._templates.items()}
        return ChatTemplate(template_text(chat_template, named), self.special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: ChatTemplate | None = None,
        **options: Any,
    ) -> str:
        """Render a chat to text; the options are those of ``ChatTemplate.render``.

        Raises RequestError if the template rejects the messages, or if there is no template: the
        model has none, and ``chat_template`` is None.
        """
        template = chat_template or self.chat_template(with_tools=bool(tools))
        return template.render(messages, tools=tools, **options)

    def apply_chat_template(self, messages: list[Message], **options: Any) -> list[int]:
        """Render a chat as ``render_chat`` and tokenize it without adding a second BOS."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


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
