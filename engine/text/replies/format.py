"""What a file of ``formats`` declares: how some models write tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kiln.engine.text.replies.calls import Calls, Offer
from kiln.engine.text.replies.lark import Lark
from kiln.engine.text.replies.message import MessageBuilder, random_call_id
from kiln.engine.text.replies.source import Steps, TextSource


class Tools:
    """The functions that a request offers, in OpenAI's form ``{"type": "function", …}``."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool.get("function") or {} for tool in tools]
        self._schemas = {one.get("name"): one.get("parameters") or {} for one in functions}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._schemas)

    def __contains__(self, name: str) -> bool:
        """Whether a function of that name is offered."""
        return name in self._schemas

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schema of a function's arguments; empty for an unknown function."""
        found = self._schemas.get(name)
        return found if isinstance(found, Mapping) else {}


Parse = Callable[[TextSource, MessageBuilder, Tools], Steps[None]]
Write = Callable[[Lark, Offer], Calls]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How some models write tool calls.

    ``names`` are values of ``--tool-call-parser``. ``parse`` reads a reply to its end, and
    ``write`` gives the grammar of the calls that it reads. A chat template shows the format if it
    has a text of each group in ``shown_by`` and none of ``unless``. ``marks`` must be visible in
    the text, though a tokenizer may have them as special tokens; ``stops`` are special tokens that
    end a reply. With ``reasons`` the format also separates reasoning, so that it reads every chat,
    with tools or without.
    """

    names: tuple[str, ...]
    parse: Parse
    write: Write
    shown_by: tuple[tuple[str, ...], ...]
    unless: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    reasons: bool = False
    new_id: Callable[[], str] = random_call_id

    def is_shown_by(self, template: str) -> bool:
        """Whether a chat template writes calls in this format."""
        groups = all(any(text in template for text in group) for group in self.shown_by)
        return groups and not any(text in template for text in self.unless)
