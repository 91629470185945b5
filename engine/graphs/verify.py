"""How thoroughly captured graphs are compared with eager steps: KILN_GRAPH_VERIFY."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kiln.cache.env import EnvError

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

    def cases(self, buckets: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield pairs of a bucket and a number of rows that runs in it.

        Each bucket is tried full, with one row of padding, and with as much as there can be.
        """
        if self.mode == "off" or not buckets:
            return
        chosen = set(buckets)
        if self.mode == "fast":
            chosen = {buckets[0], buckets[len(buckets) // 2], buckets[-1]}
        for before, bucket in zip((0, *buckets), buckets, strict=False):
            if bucket in chosen:
                for rows in sorted({before + 1, max(bucket - 1, before + 1), bucket}):
                    yield bucket, rows
