"""Read messages, from a terminal or a pipe."""

from __future__ import annotations

import sys

from kiln.engine.cli.chat.history import History, typed

_BLOCK = '"""'


class Messages:
    r"""Reads a message at a time: a line, lines that end in \, or lines between two \"\"\".

    ``history`` None: the input is not a terminal, and no prompt is shown.
    """

    def __init__(self, history: History | None) -> None:
        self._history = history
        self._interrupted = False  # by a Ctrl-C at an empty prompt
        self._is_typing = False

    def next(self) -> str | None:
        """Return the next message as it was written, or None at the end of the input.

        On a terminal Ctrl-C drops what was typed, and ends the input if it comes twice.
        """
        while True:
            self._is_typing = True
            try:
                text = self._message()
            except EOFError:
                self._break()
                return None
            except KeyboardInterrupt:
                if self._history is None:
                    raise
                self._break()
                if self.interrupt():
                    return None
                continue
            self._interrupted = self._is_typing = False
            if self._history is not None:
                self._history.add(text)
            return text

    def interrupt(self) -> bool:
        """Note a Ctrl-C when nothing was going on; return whether it is the second in a row."""
        if self._is_typing and typed():
            self._interrupted = False  # it dropped a line
            return False
        if self._interrupted:
            return True
        self._interrupted = True
        print("(Ctrl-C again, Ctrl-D or /quit ends)")
        return False

    def _message(self) -> str:
        if self._history is not None:
            print()
        text = self._line("> ")
        if text.strip() == _BLOCK or (text.startswith(_BLOCK) and _BLOCK not in text[3:]):
            return self._block(text.strip().removeprefix(_BLOCK))
        if text.startswith(_BLOCK) and text.rstrip().endswith(_BLOCK):
            return text.rstrip()[3:-3]
        while text.endswith("\\"):
            text = f"{text[:-1]}\n{self._more()}"
        return text

    def _more(self, end: str = "") -> str:
        """Return the next line of a message; ``end`` at the end of a pipe."""
        try:
            return self._line(". ")
        except EOFError:
            if self._history is not None:
                raise
            return end

    def _block(self, first: str) -> str:
        """Read up to the line that ends in three quotes; all of a pipe that has none."""
        lines = [first] if first else []
        while True:
            line = self._more(end=_BLOCK)
            if line.rstrip().endswith(_BLOCK):
                last = line.rstrip().removesuffix(_BLOCK)
                return "\n".join([*lines, last] if last else lines)
            lines.append(line)

    def _line(self, prompt: str) -> str:
        return input(prompt if self._history is not None else "").rstrip("\r")

    def _break(self) -> None:
        """End the line of the prompt: what follows, such as the shell's prompt, needs its own."""
        if self._history is not None:
            print()
            sys.stdout.flush()
