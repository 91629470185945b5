"""Render a chat to a prompt with the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kiln.engine.errors import ModelError, RequestError

Message = dict[str, Any]

_MAX_RENDERED = 64 * 2**20  # characters; more than any context holds
_MAX_SHOWN = 200  # characters of a template's error message


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
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: object,
    ) -> str:
        """Return the text of a chat. ``variables`` are for the template (``enable_thinking`` …).

        Raises RequestError if there are no messages, or if the template rejects them.
        """
        if not messages:
            raise RequestError("messages is empty: give at least one", "messages")
        if not all(isinstance(message, dict) for message in messages):
            raise RequestError("messages must be objects with a role and content", "messages")
        try:
            pieces = self._template.generate(
                messages=[_without_nulls(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **variables},
            )
            return _joined(pieces)
        except Exception as error:  # a template is a program and can raise anything
            said = str(error)[:_MAX_SHOWN] or type(error).__name__
            raise RequestError(
                f"the model's chat template does not accept these messages: {said}", "messages"
            ) from error


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; the text is unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja wants a plain set)

    def parse(self, parser: Parser) -> list[Node]:
        """Return the nodes inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _joined(pieces: Iterator[str]) -> str:
    """Join the rendered pieces. Raises ValueError as soon as the text becomes too long."""
    kept, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > _MAX_RENDERED:
            raise ValueError(f"it renders more than {_MAX_RENDERED} characters")
        kept.append(piece)
    return "".join(kept)


def _without_nulls(message: Message) -> Message:
    """Drop null fields, which many templates print, and set both field names of the reasoning."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = kept.get("reasoning_content", kept.get("thinking", kept.get("reasoning")))
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump plain JSON: Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
