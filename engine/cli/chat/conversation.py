"""What was said in a chat, and how it is saved."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kiln.engine.cli.chat.backend import CommandError, Message

_MARKDOWN = (".md", ".markdown")


@dataclass(slots=True)
class Conversation:
    """The messages in their order; ``system`` goes before them, and can change."""

    system: str | None = None
    said: list[Message] = field(default_factory=list)
    asked: str | None = None  # the last question
    is_answered: bool = False  # it, and so is among the messages

    @property
    def messages(self) -> list[Message]:
        """All messages, as a request has them."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.said]

    def ask(self, text: str) -> None:
        """Add a question."""
        self.asked = text
        self.said.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the answer, or the part that came; without any the question goes too.

        A question without an answer would confuse the next answer.
        """
        self.is_answered = bool(text)
        if text:
            self.said.append({"role": "assistant", "content": text})
        else:
            self.said.pop()

    def take_back(self) -> str:
        """Remove the last question with its answer, and return it. Raises CommandError."""
        if self.asked is None:
            raise CommandError("there is no question to ask again")
        if self.is_answered:
            del self.said[-2:]
        return self.asked

    def forget(self) -> None:
        """Remove all but the system message."""
        self.said, self.asked, self.is_answered = [], None, False

    def save(self, name: str, model: str, *, replace: bool) -> int:
        """Write the messages to a file, as its suffix says, and return how many these are.

        Only with ``replace`` an existing file is overwritten. Raises CommandError.
        """
        path = Path(os.path.expanduser(name))
        if path.suffix.lower() == ".json":
            text = json.dumps({"model": model, "messages": self.messages}, indent=2)
        elif path.suffix.lower() in _MARKDOWN:
            text = _markdown(model, self.messages)
        else:
            raise CommandError(f"{name[:80]!r}: want a file that ends in .json or .md")
        try:
            with path.open("w" if replace else "x", encoding="utf-8") as file:
                file.write(f"{text}\n")
        except FileExistsError:
            raise CommandError(
                f"{name[:80]!r} exists and stays as it is; /save! {name[:80]} replaces it"
            ) from None
        except (OSError, ValueError) as error:  # ValueError: a null byte
            reason = error.strerror if isinstance(error, OSError) else error
            raise CommandError(f"{name[:80]!r} cannot be written: {reason}") from None
        return len(self.messages)


def _markdown(model: str, messages: Sequence[Message]) -> str:
    parts = [f"# A chat with {model}"]
    for one in messages:
        parts += [f"## {one['role']}", one["content"]]
    return "\n\n".join(parts)
