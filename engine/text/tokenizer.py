"""The model's tokenizer: text to tokens and back, and chats to tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from kiln.engine.errors import RequestError
from kiln.engine.models.eos import eos_token_ids
from kiln.engine.models.hub import has_tokenizer
from kiln.engine.models.model_folder import (
    ModelFiles,
    model_vocab_size,
    tekken_path,
)
from kiln.engine.requests.sampling_params import check_surrogates
from kiln.engine.text.chat_template import ChatTemplate, Rendered, template_text
from kiln.engine.text.mistral_chats import MistralChats
from kiln.engine.text.template_files import DEFAULT, FOR_TOOLS, read_templates
from kiln.engine.text.template_forms import Message
from kiln.engine.text.token_bytes import longest_token, piece_decoder
from kiln.engine.text.tokenizer_files import read_tokenizer, special_texts

_MAX_SHOWN = 200  # characters of names


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
        chats: MistralChats | None = None,
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
        self._chats = chats
        self._piece = piece_decoder(backend)
        self._bytes: dict[tuple[int, bool], bytes] = {}

    @classmethod
    def load(
        cls, files: ModelFiles | Path, chat_template: str | None = None, *, with_chats: bool = True
    ) -> Tokenizer:
        """Load the tokenizer of a model, with another chat template if one is given.

        ``files`` may be the folder alone. ``with_chats`` false: only for texts. Raises ModelError
        if the tokenizer is missing or unreadable, or if chats need a library that is, ConfigError
        for the chat template.
        """
        files = files if isinstance(files, ModelFiles) else ModelFiles(files)
        folder = files.tokenizer_folder
        backend, config = read_tokenizer(folder)
        templates = read_templates(folder, config)
        if chat_template is not None:
            templates = {DEFAULT: template_text(chat_template, templates)}
        tekken = tekken_path(folder) if with_chats and not templates else None
        return cls(
            backend,
            special_tokens=special_texts(config),
            chat_templates=templates,
            eos_ids=eos_token_ids(files),
            model_vocab_size=model_vocab_size(files),
            chats=None if tekken is None else MistralChats(tekken, backend),
        )

    @classmethod
    def load_if_present(
        cls, files: ModelFiles | Path, chat_template: str | None = None, *, with_chats: bool = True
    ) -> Tokenizer | None:
        """Load a model's tokenizer; None without one, for serving token ids only."""
        folder = files.tokenizer_folder if isinstance(files, ModelFiles) else files
        if not has_tokenizer(folder):
            return None
        return cls.load(files, chat_template, with_chats=with_chats)

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
        """The texts of the chat templates, or of what stands for one; empty if there are none."""
        own = [] if self._chats is None else [self._chats.source]
        return [template.source for template in self._templates.values()] + own

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return bool(self._templates) or self._chats is not None

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

    def chat_template(self, *, with_tools: bool = False) -> ChatTemplate | MistralChats:
        """Return the model's chat template; some models have one of its own for tools.

        Raises RequestError if the model has none.
        """
        if self._chats is not None:
            return self._chats
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
    ) -> Rendered:
        """Render a chat; the options are those of ``ChatTemplate.render``.

        Raises RequestError if the template rejects the messages, or if there is no template: the
        model has none, and ``chat_template`` is None.
        """
        template = chat_template or self.chat_template(with_tools=bool(tools))
        made = template.render(messages, tools=tools, **options)
        return made if isinstance(made, Rendered) else Rendered(made)

    def apply_chat_template(self, messages: list[Message], **options: Any) -> list[int]:
        """Render a chat as ``render_chat`` and tokenize it without adding a second BOS."""
        text, ids = self.render_chat(messages, **options)
        return self.encode(text, add_special_tokens=False) if ids is None else ids
