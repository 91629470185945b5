"""Write tables that GitHub shows at the width of a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a bar inside a cell is escaped."""
    lines = [_line(titles), _line(["---"] * len(titles))]
    return "\n".join([*lines, *(_line([_cell(text) for text in row]) for row in rows)])


def code(*words: str) -> str:
    """Return words as code, separated by commas."""
    return ", ".join(f"`{word}`" for word in words)


def sentence(text: str) -> str:
    """Return a help text with a full stop; it may begin with a value, and keeps its case."""
    text = text.strip().replace("``", "`")
    return text + ("" if text.endswith((".", "…", "?")) else ".")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Keep what Markdown would take for a border, a tag or emphasis."""
    text = " ".join(text.split()).replace("|", "\\|")
    pieces = text.split("`")  # every second one is code, which Markdown leaves alone
    pieces[::2] = [piece.replace("<", "&lt;").replace("*", "\\*") for piece in pieces[::2]]
    return "`".join(pieces)
