"""Rules of a config for modules whose names match regular expressions; the first match counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Generic, TypeVar

from kiln.engine.models.expressions import Expression, settle
from kiln.engine.models.weights import Weights

Value = TypeVar("Value")
_ANY_END = re.compile(r"(?<!\\)\.\*$")  # changes no match, which may end anywhere
_LAST_NUMBER = re.compile(r"(.*\.)\d+(\..*)")
_NUMBERS = 512


class NameRules(Generic[Value]):
    """(expression, value) in their order. Equal ones have equal expressions and values.

    An expression must match a name from its start. ``what`` is named in errors. Raises ValueError
    for a text that is not an expression.
    """

    def __init__(self, rules: Sequence[tuple[str, Value]], what: str) -> None:
        self._rules = tuple(rules)
        self._what = what
        self._expressions = [Expression(_ANY_END.sub("", text)) for text, _ in rules]
        self._settled: set[str] = set()

    @property
    def values(self) -> list[Value]:
        """The values of all rules."""
        return [value for _, value in self._rules]

    def first(self, name: str, source: Weights) -> tuple[Value] | None:
        """Return the value of the first rule that matches the name of a module; None: no rule.

        ``source`` has the other names of modules, which are matched with this one, in one process.
        Raises ModelError if that takes too long.
        """
        if name not in self._settled:
            names = {name, *names_beside(name, source)}
            settle(self._expressions, sorted(names), self._what)
            self._settled |= names
        for expression, (_, value) in zip(self._expressions, self._rules, strict=True):
            if expression.matches(name):
                return (value,)
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NameRules) and self._rules == other._rules

    def __hash__(self) -> int:
        return hash(self._rules)


def names_beside(name: str, source: Weights) -> set[str]:
    """Return names that may be asked for next; of a source that makes up tensors, one's likes."""
    if not source.random:
        return {one.rpartition(".")[0] for one in source.names}
    numbered = _LAST_NUMBER.fullmatch(name)
    if numbered is None:
        return set()
    return {f"{numbered[1]}{number}{numbered[2]}" for number in range(_NUMBERS)}
