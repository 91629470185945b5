"""The pages of ``--help``: a short one, and those of a group, a flag, a word, or everything.

A group of many flags is folded: the short page has the names of its flags alone.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kiln.engine.cli.lines import screen_width


class PageFormatter(argparse.HelpFormatter):
    """Wraps paragraphs, and the names of a flag, which argparse lets run over the edge."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=screen_width())

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Return the names of a flag, and once what follows them."""
        if not action.option_strings or action.nargs == 0:
            text = super()._format_action_invocation(action)
        else:
            value = self._format_args(action, self._get_default_metavar_for_optional(action))
            between = "" if value.startswith("[=") else " "
            text = f"{', '.join(action.option_strings)}{between}{value}"
        indent = " " * self._current_indent
        return textwrap.fill(
            text.replace(" [", "\0["),  # "N [N ...]" stays on a line
            self._width - len(indent),
            subsequent_indent=indent + "  ",
            break_on_hyphens=False,
            break_long_words=False,
        ).replace("\0", " ")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            textwrap.fill(
                paragraph.replace("``", ""),
                width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_on_hyphens=False,
                break_long_words=False,
            )
            for paragraph in text.strip().split("\n\n")
        )


@dataclass(frozen=True, slots=True)
class Section:
    """A group of a command's flags. ``part``: the name of several groups, such as "engine"."""

    title: str
    actions: Sequence[argparse.Action]
    folded: bool = False
    part: str = ""
    is_last: bool = False  # the flags of every command

    @property
    def topic(self) -> str:
        """What is written behind ``--help=``."""
        return _plain(self.title)

    def is_called(self, name: str) -> bool:
        """Whether a name is that of the group, its first word, or that of its part."""
        return name in (self.topic, self.topic.partition("-")[0], self.part)


@dataclass(frozen=True, slots=True)
class Manual:
    """What a command's pages are made of. ``often``: flags that the short page explains."""

    program: str
    usage: str
    description: str
    sections: Sequence[Section]
    notes: Sequence[str]
    small_print: Sequence[str]  # notes of the page of everything
    often: Sequence[str] = ()

    def short(self) -> str:
        """Return the page of ``--help``."""
        page = self._begin()
        folded = [one for one in self.sections if one.folded]
        chosen = [one for name in self.often for one in self._flags() if name in one.option_strings]
        for section in self.sections:
            if section.is_last and chosen:
                _explain(page, "often used", chosen)
            if not section.folded:
                _explain(page, section.title, section.actions)
        text = self._end(page, self.notes)
        return "\n".join([text, self._how(folded), *_names(folded), ""]) if folded else text

    def whole(self) -> str:
        """Return the page of ``--help=all``."""
        page = self._begin()
        for section in self.sections:
            _explain(page, section.title, section.actions)
        return self._end(page, [*self.notes, *self.small_print])

    def about(self, topic: str) -> str:
        """Return the page of a group, of a part, of a flag, or of all flags that have a word.

        Empty if there is none.
        """
        wanted = _plain(topic)
        chosen = [one for one in self.sections if wanted and one.is_called(wanted)]
        page = PageFormatter(self.program)
        for section in chosen:
            _explain(page, section.title, section.actions)
        if chosen:
            return page.format_help()
        flags = [one for one in self._flags() if wanted in map(_plain, one.option_strings)]
        if not flags:
            flags = [one for one in self._flags() if _tells_of(one, topic)]
        if flags:
            _explain(page, f"flags of {self.program}", flags)
        return page.format_help() if flags else ""

    def topics(self) -> str:
        """Return the names of the groups, as a line."""
        return ", ".join(one.topic for one in self.sections if one.title)

    def _flags(self) -> list[argparse.Action]:
        every = [one for section in self.sections for one in section.actions]
        return [one for one in every if one.option_strings and one.help != argparse.SUPPRESS]

    def _begin(self) -> PageFormatter:
        page = PageFormatter(self.program)
        page.add_text(f"usage: {self.usage}")
        page.add_text(self.description)
        return page

    def _end(self, page: PageFormatter, notes: Iterable[str]) -> str:
        for note in notes:
            page.add_text(note)
        return page.format_help()

    def _how(self, folded: Sequence[Section]) -> str:
        part = next((f", --help={one.part} of all of the {one.part}" for one in folded), "")
        return textwrap.fill(
            f"more flags, by group. --help={folded[0].topic} shows the meaning of these{part}, "
            "--help=FLAG of one, --help=WORD of all with a word, --help=all of everything, "
            "--help=page in a pager:",
            screen_width(),
            break_on_hyphens=False,
        )


def _names(folded: Sequence[Section]) -> list[str]:
    """Return the lines of the folded groups: each with the own names of its flags."""
    column = max(len(one.topic) for one in folded) + 4
    lines = []
    for section in folded:
        names = [_own_name(one) for one in section.actions if one.help != argparse.SUPPRESS]
        lines += textwrap.wrap(
            " ".join(names),
            screen_width(),
            initial_indent=f"  {section.topic}".ljust(column),
            subsequent_indent=" " * column,
            break_on_hyphens=False,
            break_long_words=False,
        )
    return lines


def _explain(page: PageFormatter, title: str, actions: Sequence[argparse.Action]) -> None:
    page.start_section(title or None)
    page.add_arguments(actions)
    page.end_section()


def _own_name(action: argparse.Action) -> str:
    return next(name for name in action.option_strings if name.startswith("--"))


def _plain(text: str) -> str:
    """Return a name without what people write in different ways."""
    return text.strip().lstrip("-").lower().replace("_", "-").replace(" ", "-")


def _tells_of(action: argparse.Action, word: str) -> bool:
    """Whether a word is in a flag's names or in its help."""
    named = any(_plain(word) in _plain(name) for name in action.option_strings)
    return named or word.strip().lower() in (action.help or "").lower()
