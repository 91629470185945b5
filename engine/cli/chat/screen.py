"""Show an answer as it comes."""

from __future__ import annotations

import sys

from kiln.engine.cli.chat.backend import Piece
from kiln.engine.cli.lines import has_styles, styled

_ENDINGS = {"length": "(cut off: the limit of tokens)", "stopped": "(stopped)"}


class AnswerDisplay:
    """Prints an answer to stdout: on a terminal with its reasoning, dim; elsewhere without."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._shown = ""  # the last text that was printed
        self._is_reasoning = False
        self._is_terminal = sys.stdout.isatty()

    @property
    def text(self) -> str:
        """The answer so far, without its reasoning."""
        return "".join(self._said)

    def add(self, piece: Piece) -> None:
        """Print a piece."""
        if piece.is_reasoning:
            if self._is_terminal:
                self._turn(to_reasoning=True)
                self._print(piece.text, dim=True)
            return
        self._said.append(piece.text)
        self._turn(to_reasoning=False)
        self._print(piece.text)

    def end(self, reason: str | None) -> None:
        """Print the end of the answer; ``reason``: why it ended."""
        note = _ENDINGS.get(reason or "", "") if self._is_terminal else ""
        if note:
            self._print(f" {note}" if self._shown else note, dim=True)
        if self._shown or reason != "broken":
            print(flush=True)

    def _turn(self, *, to_reasoning: bool) -> None:
        """Set reasoning and answer apart, in words where there is no style."""
        if to_reasoning == self._is_reasoning:
            return
        self._is_reasoning = to_reasoning
        if self._shown:
            self._print("\n\n" if not self._shown.endswith("\n") else "\n")
        if not has_styles():
            self._print("(reasoning)\n" if to_reasoning else "(answer)\n")

    def _print(self, text: str, *, dim: bool = False) -> None:
        self._shown = text
        print(styled(text, "dim") if dim else text, end="", flush=True)
