"""Regular expressions of a config that comes with weights, matched within a time limit.

Python's ``re`` takes exponential time for some expressions, and cannot be interrupted meanwhile.
So an expression that repeats or chooses is matched in a process of its own, which can be killed.
An expression that is only the name of a module, or ".*" and a name, takes no such time. It is
matched in this process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

from kiln.engine.errors import ModelError

MAX_LENGTH = 4096  # characters of one expression
SECONDS = 5.0  # for all expressions of a config
# ".*", then names, an escaped dot or \d, then "$": each character behind the first two can match in
# one way only.
_PLAIN = re.compile(r"(?:\.\*)?(?:[\w.-]|\\[.d])*\$?")
_PROGRAM = """
import json, re, sys
sys.setrecursionlimit(10_000)
expressions, names = json.load(sys.stdin)
found = []
for text, full in expressions:
    compiled = re.compile(text)
    match = compiled.fullmatch if full else compiled.match
    matches = ((index, match(name)) for index, name in enumerate(names))
    found.append([[i, m[1] if compiled.groups else None] for i, m in matches if m])
json.dump(found, sys.stdout)
"""


class Expression:
    """A compiled expression whose matches with the names of modules are known or cheap.

    ``prefix`` and ``suffix`` are put around ``text``. It must match a name from its start, with
    ``full`` up to its end. A ``trusted`` one is matched in this process. Raises ValueError for a
    text that is not an expression.
    """

    def __init__(
        self,
        text: str,
        prefix: str = "",
        suffix: str = "",
        *,
        full: bool = False,
        trusted: bool = False,
    ) -> None:
        if len(text) > MAX_LENGTH:
            raise ValueError(f"it has {len(text)} characters, at most {MAX_LENGTH} are read")
        self.whole = f"{prefix}{text}{suffix}"
        self.full = full
        self._groups: dict[str, str | None] = {}  # by the names that match
        self._names: set[str] = set()  # for which the matches are known
        try:
            self._compiled = re.compile(self.whole)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error
        self.is_plain = trusted or _PLAIN.fullmatch(text) is not None

    def first_group(self, name: str) -> str | None:
        """Return the first group of the match with a name; None without a match."""
        return self._find(name).get(name)

    def matches(self, name: str) -> bool:
        """Whether the expression matches a name."""
        return name in self._find(name)

    def settle(self, groups: dict[str, str | None], names: Sequence[str]) -> None:
        """Take the matches with names that were found elsewhere, beside those known already."""
        self._groups.update(groups)
        self._names.update(names)

    def _find(self, name: str) -> dict[str, str | None]:
        if not self.is_plain:
            assert name in self._names, f"{name} is not settled"
            return self._groups
        compiled = self._compiled
        match = compiled.fullmatch(name) if self.full else compiled.match(name)
        return {} if match is None else {name: match[1] if compiled.groups else None}


def settle(expressions: Iterable[Expression], names: Sequence[str], what: str) -> None:
    """Match the expressions that are not plain with all names, in a process of its own.

    Raises ModelError, which begins with ``what``, if that takes too long.
    """
    slow = [expression for expression in expressions if not expression.is_plain]
    if not slow:
        return
    texts = [(expression.whole, expression.full) for expression in slow]
    try:
        run = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps([texts, list(names)]),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"{what}: its expressions take over {SECONDS:g} s to match, the first is "
            f"{slow[0].whole[:80]!r}: list the names of the modules instead"
        ) from error
    if run.returncode:
        reason = run.stderr.strip().splitlines()[-1:] or [f"exit code {run.returncode}"]
        raise ModelError(f"{what}: its expressions cannot be matched: {reason[0][:200]}")
    for expression, found in zip(slow, json.loads(run.stdout), strict=True):
        expression.settle({names[index]: group for index, group in found}, names)
