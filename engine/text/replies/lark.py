"""Build a grammar of replies: rules in llguidance's Lark, and the JSON Schemas they refer to.

Expressions are texts of Lark. Source: llguidance, docs/syntax.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kiln.engine.grammar.grammar import Grammar, Schema, literal

ANY = "/(?s:.*)/"  # any text
CONTENT = "content"  # the name of the part that describes the content, if it has a form

Special = Callable[[str], int | None]


class Lark:
    """Collects rules, terminals and schemas.

    ``special`` returns the id of the special token with a text, if there is one. Such tokens are
    no text to llguidance, so that a rule must refer to them as tokens.
    """

    def __init__(self, special: Special) -> None:
        self._special = special
        self._names: dict[str, str] = {}  # of definitions
        self._schemas: dict[str, Schema] = {}

    def mark(self, text: str) -> str:
        """Return a mark of the format: a special token, or its text."""
        token = self._special(text)
        return literal(text) if token is None else f"<[{token}]>"

    def text(self, *without: str) -> str:
        """Return a text, perhaps empty, that contains none of some marks."""
        if not without:
            return self._define("T", ANY)
        marks = " | ".join(map(literal, without))
        return self._define("T", f"{ANY} & ~({ANY} ({marks}) {ANY})")

    def sequence(self, *texts: str) -> str:
        """Return texts one after the other; those that are special tokens are such."""
        first, rest = self.split(*texts)
        return f"{literal(first)} {rest}" if first else rest

    def split(self, *texts: str) -> tuple[str, str]:
        """Return the text before the first special token of a sequence, and what follows."""
        for place, text in enumerate(texts):
            if self._special(text) is not None:
                rest = self.sequence(*texts[place + 1 :])
                return "".join(texts[:place]), f"{self.mark(text)} {rest}"
        return "".join(texts), ""

    def until(self, mark: str, *without: str) -> str:
        """Return a text up to the first ``mark`` and with it, that has none of other marks.

        The last token of the text may contain a part of the mark, or of what follows it.
        """
        if self._special(mark) is not None:  # its spelling would end the text for the reader too
            return f"{self.text(mark, *without)} {self.mark(mark)}"
        return self.lazy(f"{self.text(*without)} {literal(mark)}")

    def lazy(self, terminals: str) -> str:
        """Return the shortest text that terminals match."""
        return self._define("lazy", terminals, "[lazy]")

    def terminal(self, body: str) -> str:
        """Return the name of a new terminal: it is read as one lexeme."""
        return self._define("T", body)

    def rule(self, body: str) -> str:
        """Return the name of a new rule."""
        return self._define("r", body)

    def schema(self, schema: Schema) -> str:
        """Return JSON that follows a schema."""
        name = f"s{len(self._schemas)}"
        self._schemas[name] = schema
        return f"@{name}"

    def grammar(self, start: str, content: Grammar | None) -> Grammar:
        """Return the grammar of all: ``start`` describes the reply, ``content`` its content."""
        text = "\n".join((f"start: {start}", *(f"{name}: {body}" for body, name in self._items())))
        whole = Grammar.of_lark(text) if content is None else content.inside(text, CONTENT)
        return replace(whole, schemas={**whole.schemas, **self._schemas})

    def _items(self) -> list[tuple[str, str]]:
        return [(key.partition(" ")[2], name) for key, name in self._names.items()]

    def _define(self, kind: str, body: str, options: str = "") -> str:
        key = f"{kind}{options} {body}"
        name = self._names.setdefault(key, f"{kind}{len(self._names)}{options}")
        return name.removesuffix(options)
