"""What answers a chat: a server by its URL, or an engine of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from kiln.engine.errors import KilnError

Message = dict[str, str]


class CommandError(KilnError):
    """A command of the chat, or the name of a model in it, makes no sense."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer as it comes."""

    text: str
    is_reasoning: bool = False


class Backend(Protocol):
    """What answers. ``name``: the model or adapter that is asked, set by ``open``.

    ``finish_reason``: why the last answer ended; None while it is generated or if it broke off.
    """

    name: str
    finish_reason: str | None

    async def open(self) -> None:
        """Connect to the server, or load the model. Raises KilnError."""

    async def names(self) -> list[str]:
        """Return the models and adapters that can be asked. Raises KilnError."""

    def reply(self, messages: list[Message]) -> AsyncIterator[Piece]:
        """Yield the answer as it is generated. Raises KilnError."""

    async def close(self) -> None:
        """Give back what ``open`` took."""


def named(name: str, names: list[str]) -> str:
    """Return a name that is in a list. Raises CommandError with the list."""
    if name not in names:
        known = ", ".join(names)
        raise CommandError(f"model {name[:80]!r}: is not here; there are {known[:400]}")
    return name
