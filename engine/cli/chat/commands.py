"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from kiln.engine.cli.chat.backend import Backend, CommandError, named
from kiln.engine.cli.chat.conversation import Conversation

_WORD = re.compile(r"/[A-Za-z?]+!?")
HELP = {
    "/help": "show this",
    "/model [NAME]": "list the models and adapters, or ask another one from now on",
    "/system [TEXT]": "show the system message, or set it; - removes it",
    "/reset": "clear the conversation; the system message stays",
    "/retry": "ask the last question again",
    "/save FILE": "write the conversation to FILE.json or FILE.md; /save! replaces a file",
    "/quit": "end; so do Ctrl-D, and Ctrl-C twice. Ctrl-C stops an answer",
}
_MORE = (
    'A message of several lines: end each line but the last with \\, or write """ before the '
    "first and behind the last. A space before the message keeps it out of the history, and a "
    "slash from being a command."
)
_OTHER_NAMES = {"/exit": "/quit", "/bye": "/quit", "/clear": "/reset", "/?": "/help"}


def parse(text: str) -> tuple[str, str] | None:
    """Return a command and what follows it; None for a message. Raises CommandError.

    A path, and a sentence that begins with one, are messages.
    """
    if "\n" in text:
        return None
    word, _, rest = text.partition(" ")
    name = _OTHER_NAMES.get(word.lower(), word.lower())
    known = {one.partition(" ")[0]: one for one in (*HELP, "/save! FILE")}
    if name in known:
        if rest.strip() and " " not in known[name]:
            raise CommandError(f"{name} takes no further word; begin a message with a space")
        return name, rest.strip()
    if not _WORD.fullmatch(word) or os.path.exists(word):
        return None
    near = get_close_matches(name, known, 1, 0.7)
    if near or not rest.strip():
        hint = f"; did you mean {near[0]}?" if near else "; /help lists them"
        raise CommandError(f"{word[:80]} is no command{hint}")
    return None


def help_text(width: int) -> str:
    """Return what ``/help`` shows."""
    column = max(map(len, HELP)) + 4
    lines = []
    for name, meaning in HELP.items():
        lines += textwrap.wrap(
            meaning, width, initial_indent=f"  {name}".ljust(column), subsequent_indent=" " * column
        )
    return "\n".join([*lines, "", *textwrap.wrap(_MORE, width)])


@dataclass(frozen=True, slots=True)
class Commands:
    """Runs commands on a conversation. ``names`` asks the backend for its models."""

    chat: Backend
    conversation: Conversation
    names: Callable[[], list[str]]

    def run(self, name: str, rest: str) -> str:
        """Return what a command says; ``/quit``, ``/retry`` and ``/help`` are not for this.

        Raises KilnError.
        """
        match name:
            case "/model":
                return self._model(rest)
            case "/system":
                return self._system(rest)
            case "/save" | "/save!":
                if not rest:
                    raise CommandError(f"{name} needs a file, such as {name} chat.md")
                count = self.conversation.save(rest, self.chat.name, replace=name == "/save!")
                return f"{count} messages are in {rest}"
            case _:
                self.conversation.forget()
                return "the conversation is empty again"

    def _model(self, wanted: str) -> str:
        names = self.names()
        if not wanted:
            return "\n".join(f"{'*' if one == self.chat.name else ' '} {one}" for one in names)
        self.chat.name = named(wanted, names)
        return f"{wanted} answers from now on; it reads the conversation so far"

    def _system(self, text: str) -> str:
        if text:
            self.conversation.system = None if text == "-" else text
        now = self.conversation.system
        return "there is no system message" if now is None else f"system message: {now}"
