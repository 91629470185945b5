"""How thoroughly captured graphs are compared with eager steps: KILN_GRAPH_VERIFY."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kiln.cache.env import EnvError
from kiln.engine.graphs.runner import GraphKey

_FORMS = ("off", "fast", "full")


@dataclass(frozen=True, slots=True)
class Verification:
    """``mode``: off, fast or full, before serving; ``every``: one of so many steps, 0: none."""

    mode: str
    every: int = 0

    @classmethod
    def parse(cls, text: str) -> Verification:
        """Read off, fast, full or shadow:N. Raises EnvError."""
        kind, _, number = text.partition(":")
        if kind == "shadow" and number.isdecimal() and int(number) > 0:
            return cls("fast", int(number))
        if text not in _FORMS:
            raise EnvError(
                f"KILN_GRAPH_VERIFY={text!r}: choose off, fast, full, or shadow:N with N above 0"
            )
        return cls(text)

    def cases(self, keys: Sequence[GraphKey]) -> Iterator[tuple[GraphKey, int]]:
        """Yield pairs of a graph's size and a number of tokens, or rows of decode, that run in it.

        Fast: the smallest, the middle and the largest of each kind, each of them full, and with as
        much padding as there can be. Full: every size, also with one token of padding.
        """
        if self.mode == "off":
            return
        kinds: dict[tuple[int, int, str], list[GraphKey]] = {}
        for key in keys:
            kind = (key.row_tokens, 0 if key.is_decode else key.rows, key.variant)
            kinds.setdefault(kind, []).append(key)
        for own in kinds.values():
            chosen = {own[0], own[len(own) // 2], own[-1]} if self.mode == "fast" else set(own)
            before = 0
            for key in own:
                size = key.rows if key.is_decode else key.tokens
                if key in chosen:
                    almost = max(size - 1, before + 1) if self.mode == "full" else size
                    for used in sorted({before + 1, almost, size}):
                        yield key, used
                before = size
