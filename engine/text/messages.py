"""Read the messages of a chat into the form that a chat template expects.

All chats come through here, from the server and from ``LLM.chat``. Clients send content as a text
or as a list of parts, and the arguments of tool calls as JSON text; templates want one or the
other, and arguments as an object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kiln.engine.errors import field_error
from kiln.engine.text.template_forms import ContentForm, Message, TemplateForms, as_parts

TEXT_PARTS = ("text", "input_text", "output_text")  # the last two are names of /v1/responses
_BETWEEN_TEXTS = "\n"  # joins the text parts of one message, as in vLLM
_BETWEEN_SYSTEM = "\n\n"  # joins the system messages that become one
# Without meaning for a template. The last two repeat the content, or a call's arguments, as an
# object in the answers of the stream helpers of OpenAI's clients.
_DROPPED = ("cache_control", "annotations", "parsed", "parsed_arguments")
_FORMATS: Mapping[str, ContentForm | None] = MappingProxyType(
    {"auto": None, "string": "text", "openai": "parts"}
)
_MAX_SHOWN = 80  # characters of a value in an error


def read_messages(
    messages: Sequence[Mapping[str, Any]], forms: TemplateForms, content_format: str = "auto"
) -> list[Message]:
    """Return messages as the template wants them. Raises RequestError naming the wrong field.

    Text parts are joined by newlines where the template prints the content, and a text becomes one
    part where it loops over parts. Nulls are dropped. A developer's message is a system message for
    a template that does not show that role. ``content_format`` "string" or "openai" (parts) sets
    the form of content instead, by vLLM's names.
    """
    if content_format not in _FORMATS:
        name = "chat_template_content_format"
        raise field_error(name, f"must be {', '.join(_FORMATS)}, got {content_format!r}")
    form = _FORMATS[content_format]
    read = [_read(message, f"messages[{i}]", forms) for i, message in enumerate(messages)]
    return [_shaped(message, forms, form) for message in _with_known_roles(read, forms)]


def part_text(part: object, where: str) -> str:
    """Return the text of a content part. Raises RequestError, also for images, audio and files."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise field_error(where, f"must be an object with a type, got {shortened(part)}")
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        only = "but the model reads only text: send parts of the type 'text'"
        raise field_error(f"{where}.type", f"is {shortened(kind)}, {only}")
    text = part.get("text")
    if not isinstance(text, str):
        raise field_error(f"{where}.text", f"must be a string, got {shortened(text)}")
    return text


def _read(message: object, where: str, forms: TemplateForms) -> Message:
    """Check one message; its content becomes a text, or a list of texts."""
    if not isinstance(message, Mapping):
        wanted = "messages must be objects with a role and content"
        raise field_error(where, f"{wanted}, got {shortened(message)}")
    read = {name: v for name, v in message.items() if v is not None and name not in _DROPPED}
    role, content = read.get("role"), read.get("content")
    if not isinstance(role, str):
        raise field_error(f"{where}.role", f"must be a string, got {shortened(role)}")
    if isinstance(content, Sequence) and not isinstance(content, str):
        places = (f"{where}.content[{i}]" for i in range(len(content)))
        read["content"] = [part_text(*each) for each in zip(content, places, strict=True)]
    elif not isinstance(content, str) and (content is not None or role != "assistant"):
        wanted = "must be a string or a list of parts"
        raise field_error(f"{where}.content", f"{wanted}, got {shortened(content)}")
    _check_role(role, read, where, forms)
    if calls := read.pop("tool_calls", None):
        as_text = forms.calls.arguments_as_text
        read["tool_calls"] = [
            _read_call(call, f"{where}.tool_calls[{i}]", as_text) for i, call in enumerate(calls)
        ]
    return _with_reasoning(read)


def _check_role(role: str, message: Message, where: str, forms: TemplateForms) -> None:
    """Refuse a message whose text would be lost, and a tool's answer to no call."""
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        says = "is required of a tool's message: the id of the call that it answers"
        raise field_error(f"{where}.tool_call_id", says)
    shown = forms.content(role) or (role == "developer" and forms.content("system"))
    if role in ("tool", "developer") and not shown:
        says = f"is {role!r}, but the model's chat template shows no such messages"
        raise field_error(f"{where}.role", says)


def _read_call(call: object, where: str, as_text: bool) -> Message:
    """Return a tool call with its arguments as an object, or as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise field_error(f"{where}.function", "must be an object with a name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        shown = shortened(function.get("arguments"))
        raise field_error(f"{where}.function.arguments", f"must be a JSON object, got {shown}")
    if as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    kept = {name: value for name, value in call.items() if name not in ("index", *_DROPPED)}
    called = {name: value for name, value in function.items() if name not in _DROPPED}
    return {**kept, "function": {**called, "arguments": arguments}}


def _parsed(arguments: str) -> object:
    """Return the object of JSON text, None of an empty one, and other text as it is."""
    if not arguments.strip():
        return None
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _with_reasoning(message: Message) -> Message:
    """Give the reasoning both names that templates use."""
    named = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in named if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_known_roles(messages: list[Message], forms: TemplateForms) -> list[Message]:
    """Turn developer messages into system messages, if the template does not show that role.

    Those at the start become one, because many templates accept a single system message; so does
    a later one that the template would not show in its place.
    """
    if all(message["role"] != "developer" for message in messages) or forms.content("developer"):
        return messages
    made: list[Message] = []
    leading: list[Message] = []
    for message in messages:
        at_start = len(made) == 0
        if message["role"] == "developer":
            message = {**message, "role": "system"}
            at_start = at_start or not forms.shows_late_system_messages
        if at_start and message["role"] == "system":
            leading.append(message)
        else:
            made.append(message)
    text = _BETWEEN_SYSTEM.join(_joined(message["content"]) for message in leading)
    return [{**leading[0], "content": text}, *made] if leading else made


def _shaped(message: Message, forms: TemplateForms, form: ContentForm | None) -> Message:
    """Give the content a form, or the one that the template wants for its role."""
    content = message.get("content")
    if content is None:
        no_content: Message = {"content": ""}
        if "tool_calls" in message:
            no_content = forms.calls.no_content
        elif forms.content("assistant") == "parts":
            no_content = {"content": as_parts("")}
        return {**message, **no_content}
    wanted = form or forms.content(message["role"])
    if wanted == "parts" or (wanted == "either" and not isinstance(content, str)):
        texts = [content] if isinstance(content, str) else content
        return {**message, "content": [part for text in texts for part in as_parts(text)]}
    return {**message, "content": _joined(content)}


def _joined(content: str | list[str]) -> str:
    return content if isinstance(content, str) else _BETWEEN_TEXTS.join(content)


def shortened(value: object) -> str:
    """Return a value as text of limited length, for errors."""
    if isinstance(value, Mapping | list):
        return "an object" if isinstance(value, Mapping) else "a list"
    text = repr(value[:_MAX_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
