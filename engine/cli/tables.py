"""A page of Markdown as a terminal shows it: tables in columns, no line longer than its width."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest

_BAR = re.compile(r"(?<!\\)\|")
_NARROWEST = 6


def fit_page(page: str, width: int) -> str:
    """Return a page with its tables in columns, and its paragraphs wrapped."""
    shown: list[str] = []
    for is_table, lines in groupby(page.splitlines(), lambda line: line.startswith("|")):
        if is_table:
            shown += _fit_table([_cells(line) for line in lines], width)
            continue
        for line in lines:
            shown += textwrap.wrap(line, width, break_on_hyphens=False) or [""]
    return "\n".join(shown)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in _BAR.split(line.strip()[1:-1])]


def _fit_table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a table: its names, wrapped if need be, a rule, and its rows."""
    names, marks, *body = rows
    columns = list(zip(*body, strict=True)) or [()] * len(names)
    least = [
        max(1, *map(len, name.split()), *map(len, column))
        for name, column in zip(names, columns, strict=True)
    ]
    gap = 2 if sum(least) + 2 * (len(least) - 1) <= width else 1
    widths = _widths(names, least, width - gap * (len(names) - 1))
    right = [mark.endswith(":") for mark in marks]
    rule = ["─" * one for one in widths]
    return [
        (" " * gap).join(line).rstrip()
        for row in (names, rule, *body)
        for line in _row(row, widths, right)
    ]


def _widths(names: Sequence[str], least: Iterable[int], room: int) -> list[int]:
    """Return the width of each column: its values', with its name in as few lines as there is room.

    If there is no room for the values, the widest columns are cut, and their values wrapped.
    """
    widths = list(least)
    while sum(widths) > room and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    while sum(widths) < room:
        heights = [len(textwrap.wrap(name, one)) for name, one in zip(names, widths, strict=True)]
        if max(heights) < 2:
            break
        widths[heights.index(max(heights))] += 1
    return widths


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> Iterator[list[str]]:
    """Yield the lines of a row, each as its parts."""
    wrapped = [
        textwrap.wrap(cell, one, break_on_hyphens=False)
        for cell, one in zip(cells, widths, strict=True)
    ]
    for parts in zip_longest(*wrapped, fillvalue=""):
        yield [
            part.rjust(one) if is_right else part.ljust(one)
            for part, one, is_right in zip(parts, widths, right, strict=True)
        ]
