"""What a chat template expects of messages, found by rendering small chats with it.

A template is a program: whether it prints a message's content, or loops over its parts, may depend
on the role, on macros, and on tests such as ``content is string``. Rendering shows what it does;
its syntax tree would only show a loop somewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Message = dict[str, Any]
ContentForm = Literal["text", "parts", "either"]

_TEXT = "kilntrial"
_CALL_ID = "kilntrial"  # nine letters, which Mistral's templates insist on
_PRINTED_PARTS = re.compile(r"""['"]text['"] *:""")  # the list itself, as Python or JSON shows it
_PRINTED_OBJECT = re.compile(r"'city' *:")
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class CallForm:
    """How an assistant's tool calls reach a template.

    ``arguments_as_text``: as JSON text; most templates want an object. ``no_content`` is added to
    a message without content.
    """

    arguments_as_text: bool
    no_content: Message


class TemplateForms:
    """The forms of messages that one template accepts; each is found when it is first needed.

    ``render`` returns the text of messages, as they are, with tools.
    """

    def __init__(self, render: Callable[[list[Message], list[dict[str, Any]]], str]) -> None:
        self._render = render
        self._contents: dict[str, ContentForm | None] = {}

    def content(self, role: str) -> ContentForm | None:
        """Return the form of the content of a role; None if no form shows the text."""
        if role not in self._contents:
            # Tools may change how a template prints a message, and some templates reject them.
            self._contents[role] = self._find(role, [_TOOL]) or self._find(role, [])
        return self._contents[role]

    @cached_property
    def shows_late_system_messages(self) -> bool:
        """Whether a system message behind the first user message is shown."""
        late = {"role": "system", "content": self._fit("system", _TEXT)}
        before = [self._message("user"), self._message("assistant")]
        return _TEXT in self._try([*before, late, self._message("user")], [])

    @cached_property
    def calls(self) -> CallForm:
        """How tool calls are shown; the usual form if none is shown."""
        empty = self._fit("assistant", "")
        no_contents: tuple[Message, ...] = ({"content": empty}, {"content": None}, {})
        forms = [CallForm(as_text, none) for as_text in (False, True) for none in no_contents]
        for form in forms:
            shown = self._try([self._message("user"), self._call(form)], [_TOOL])
            if _TEXT in shown and "weather" in shown and not _PRINTED_OBJECT.search(shown):
                return form
        return forms[0]

    def _find(self, role: str, tools: list[dict[str, Any]]) -> ContentForm | None:
        text = _TEXT in self._try(self._chat(role, _TEXT), tools)
        shown = self._try(self._chat(role, as_parts(_TEXT)), tools)
        parts = _TEXT in shown and not _PRINTED_PARTS.search(shown)
        if text:
            return "either" if parts else "text"
        return "parts" if parts else None

    def _chat(self, role: str, content: object) -> list[Message]:
        """Return a chat with this content in a message of this role."""
        message = {"role": role, "content": content}
        match role:
            case "user":
                return [message]
            case "assistant":
                return [self._message("user"), message, self._message("user")]
            case "tool":
                answer = {**message, "tool_call_id": _CALL_ID, "name": "weather"}
                return [self._message("user"), self._call(self.calls, "x"), answer]
            case _:
                return [message, self._message("user")]

    def _try(self, messages: list[Message], tools: list[dict[str, Any]]) -> str:
        """Return the text, empty if the template rejects the messages."""
        try:
            return self._render(messages, tools)
        except Exception:  # a template is a program and can raise anything
            return ""

    def _message(self, role: str) -> Message:
        return {"role": role, "content": self._fit(role, "x")}

    def _fit(self, role: str, text: str) -> object:
        return as_parts(text) if self.content(role) == "parts" else text

    def _call(self, form: CallForm, city: str = _TEXT) -> Message:
        arguments = f'{{"city": "{city}"}}' if form.arguments_as_text else {"city": city}
        function = {"name": "weather", "arguments": arguments}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        return {"role": "assistant", **form.no_content, "tool_calls": [call]}


def as_parts(text: str) -> list[Message]:
    """Return a text as a list of one content part."""
    return [{"type": "text", "text": text}]
