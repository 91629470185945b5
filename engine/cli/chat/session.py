"""The loop of a chat: read a message or a command, show the answer."""

from __future__ import annotations

import asyncio
import sys

from kiln.engine.cli.chat.backend import Backend, CommandError
from kiln.engine.cli.chat.commands import Commands, help_text, parse
from kiln.engine.cli.chat.conversation import Conversation
from kiln.engine.cli.chat.history import History, history_file
from kiln.engine.cli.chat.lines_in import Messages
from kiln.engine.cli.chat.screen import AnswerDisplay
from kiln.engine.cli.lines import hang, screen_width, styled
from kiln.engine.errors import EngineDeadError, KilnError

_SHOWN = 500  # characters of an error


class Session:
    """A chat on stdin and stdout. Without a terminal an error ends it."""

    def __init__(
        self, runner: asyncio.Runner, chat: Backend, system: str | None, *, keep_history: bool
    ) -> None:
        self._runner = runner
        self._chat = chat
        self._is_terminal = sys.stdin.isatty()
        self._conversation = Conversation(system)
        self._commands = Commands(chat, self._conversation, lambda: runner.run(chat.names()))
        history = History(history_file() if keep_history else None) if self._is_terminal else None
        self._messages = Messages(history)

    def talk(self) -> None:
        """Answer until the input ends. Raises KilnError."""
        if self._is_terminal:
            print(f"{self._chat.name}. A line is a message; /help lists the commands.")
        while (text := self._messages.next()) is not None:
            try:
                if not self._take(text):
                    return
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                print()
                if self._messages.interrupt():
                    return
            except KilnError as error:
                ends = not self._is_terminal and not isinstance(error, CommandError)
                if ends or isinstance(error, EngineDeadError):
                    raise
                print(*self._error_lines(error), sep="\n", file=sys.stderr)

    def _take(self, text: str) -> bool:
        """Do what a text asks for; return False for ``/quit``. Raises KilnError."""
        command = parse(text)
        if command is None:
            if text.strip():
                self._conversation.ask(text.strip())
                self._answer()
            return True
        name, rest = command
        if name == "/quit":
            return False
        if name == "/help":
            print(help_text(screen_width()))
        elif name == "/retry":
            question = self._conversation.take_back()
            if self._is_terminal:
                print(styled(question, "dim"))
            self._conversation.ask(question)
            self._answer()
        else:
            said = self._commands.run(name, rest)
            print(said, file=sys.stdout if self._is_terminal else sys.stderr)
        return True

    def _error_lines(self, error: KilnError) -> list[str]:
        text = " ".join(str(error).split())[:_SHOWN]
        return hang("error: ", text, 2) if self._is_terminal else [f"error: {text}"]

    def _answer(self) -> None:
        """Show the answer as it streams; Ctrl-C stops it, and the part that came is kept."""
        display = AnswerDisplay()
        try:
            self._runner.run(self._show(display))
            display.end(self._chat.finish_reason)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            display.end("stopped")
        except KilnError:
            display.end("broken")
            raise
        finally:
            self._conversation.answer(display.text)

    async def _show(self, display: AnswerDisplay) -> None:
        async for piece in self._chat.reply(self._conversation.messages):
            display.add(piece)
