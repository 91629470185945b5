"""Lines of text that fit the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap

from kiln.cache.env import wants_plain_text

_WIDEST = 100  # columns: longer lines are hard to read
_STYLES = {"green": "32", "yellow": "33", "red": "31", "dim": "2"}


def screen_width() -> int:
    """Return how many columns a line may have. The last one of a terminal stays free."""
    return max(20, min(shutil.get_terminal_size().columns, _WIDEST + 1) - 1)


def hang(head: str, text: str, indent: int | None = None) -> list[str]:
    """Return the lines of a text behind a head, below which nothing is written.

    ``indent``: of all lines but the first; None: the head's length.
    """
    return textwrap.wrap(
        text,
        screen_width(),
        initial_indent=head,
        subsequent_indent=" " * (len(head) if indent is None else indent),
        break_on_hyphens=False,
    ) or [head.rstrip()]


def has_styles() -> bool:
    """Whether stdout shows styles: a terminal does, unless NO_COLOR is set."""
    return sys.stdout.isatty() and not wants_plain_text()


def styled(text: str, style: str) -> str:
    """Return a text for stdout, in a style if it shows any."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if has_styles() else text
