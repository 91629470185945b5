"""Render a chat to a prompt with the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kiln.engine.errors import ConfigError, ModelError, RequestError, field_error
from kiln.engine.text.messages import read_messages
from kiln.engine.text.template_forms import Message, TemplateForms

_MAX_RENDERED = 64 * 2**20  # characters; more than any context holds
_MAX_TRIAL = 2**20  # characters of a trial
_MAX_SHOWN = 200  # characters of a template's error message
# Appended to the message to continue. The space shows whether the template trims the content.
_END_OF_TEXT = "KILN_CONTINUES_THIS_MESSAGE "
# What a chat is rendered from: requests set these by fields of their own, or not at all.
_OWN_VARIABLES = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
)
_OWN_VARIABLES |= {"conversation", "tokenize", "self", "caller", "loop", "varargs", "kwargs"}


class Rendered(NamedTuple):
    """A chat as text, and as tokens if it was written as such: else the text is tokenized."""

    text: str
    token_ids: list[int] | None = None


class ChatTemplate:
    """A model's sandboxed Jinja template, with the functions that transformers provides.

    ``special_tokens`` (``bos_token`` …) are variables of the template.
    Raises ModelError when the template does not parse.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        self._special_tokens = special_tokens
        self._reserved = _OWN_VARIABLES | set(environment.globals) | set(special_tokens)
        try:
            self._template = environment.from_string(source)
            self._reads = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template, line {error.lineno}: {error.message}") from error

    @cached_property
    def forms(self) -> TemplateForms:
        """The forms of messages that the template accepts."""

        def render(messages: list[Message], tools: list[dict[str, Any]]) -> str:
            return self._text(messages, tools, {"add_generation_prompt": False}, _MAX_TRIAL)

        return TemplateForms(render)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        content_format: str = "auto",
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the text of a chat. ``variables`` are for the template (``enable_thinking`` …).

        With ``continue_final_message`` the text ends with the content of the last message; else an
        answer is asked for, unless ``add_generation_prompt`` is false. ``content_format`` as in
        ``read_messages``. Raises RequestError if there are no messages, if one is malformed, or if
        the template rejects them.
        """
        if not messages:
            raise RequestError("messages is empty: give at least one", "messages")
        if continue_final_message and add_generation_prompt:
            raise field_error(
                "continue_final_message",
                "asks for the rest of the last message, and add_generation_prompt for a new one: "
                "send one of them",
            )
        variables = variables or {}
        self._check(tools, variables)
        read = read_messages(messages, self.forms, content_format)
        if continue_final_message:
            read[-1] = _marked(read[-1], len(read) - 1)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        settings = {"add_generation_prompt": add_generation_prompt, **variables}
        try:
            text = self._text(read, tools, settings, _MAX_RENDERED)
        except Exception as error:  # a template is a program and can raise anything
            said = str(error)[:_MAX_SHOWN] or type(error).__name__
            raise RequestError(
                f"the model's chat template does not accept these messages: {said}", "messages"
            ) from error
        return _continued(text) if continue_final_message else text

    def _text(
        self,
        messages: list[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, object],
        limit: int,
    ) -> str:
        given = {"documents": None, **self._special_tokens, **variables}
        return _joined(
            self._template.generate({**given, "messages": messages, "tools": tools}), limit
        )

    def _check(
        self, tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, object]
    ) -> None:
        """Refuse tools that the model would not see, and variables that Kiln sets itself."""
        if tools and "tools" not in self._reads:
            raise field_error(
                "tools",
                "the model's chat template does not show them to the model: leave them out, or "
                "send tool_choice 'none'",
            )
        for name in variables:
            if name in self._reserved:
                where = f"chat_template_kwargs.{name[:_MAX_SHOWN]}"
                raise field_error(where, "is set by Kiln, and cannot be replaced")


def template_text(given: str, named: Mapping[str, str]) -> str:
    """Return the text of a template that is given by name, as a file or as text.

    ``named``: the model's own templates. What has braces or several lines is a
    template. Raises ConfigError.
    """
    if given in named:
        return named[given]
    if any(mark in given for mark in "{}\n"):
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = f": {', '.join(named)[:_MAX_SHOWN]}" if named else ""
        raise ConfigError(
            f"chat_template {given[:_MAX_SHOWN]!r}: cannot be read ({error}): give a file, the "
            f"text of a template, or a name of the model's own{names}"
        ) from error


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; the text is unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja wants a plain set)

    def parse(self, parser: Parser) -> list[Node]:
        """Return the nodes inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _marked(message: Message, index: int) -> Message:
    """Return a message whose text ends with a mark. Raises RequestError if it has no text."""
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        return {**message, "content": content + _END_OF_TEXT}
    if isinstance(content, list) and content and content[-1]["text"].strip():
        last = {**content[-1], "text": content[-1]["text"] + _END_OF_TEXT}
        return {**message, "content": [*content[:-1], last]}
    says = "is empty, but continue_final_message continues it"
    raise field_error(f"messages[{index}].content", says)


def _continued(text: str) -> str:
    """Return the text up to the mark, as transformers does. Raises RequestError without it."""
    place = text.rfind(_END_OF_TEXT.strip())
    if place < 0:
        says = "the model's chat template does not show the last message"
        raise field_error("continue_final_message", says)
    trimmed = not text.startswith(_END_OF_TEXT, place)
    return text[:place].rstrip() if trimmed else text[:place]


def _joined(pieces: Iterator[str], limit: int) -> str:
    """Join the rendered pieces. Raises ValueError as soon as the text becomes too long."""
    kept, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > limit:
            raise ValueError(f"it renders more than {limit} characters")
        kept.append(piece)
    return "".join(kept)


def _tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    """Dump plain JSON: Jinja's own filter escapes it for HTML. ``options`` are those of json."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
