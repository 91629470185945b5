"""The interface of a measured engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kiln.engine.errors import KilnError

Tell = Callable[[str], None]  # gets a text that says what is running now


class BenchError(KilnError):
    """An engine failed, or did not do what it was asked to do: nothing to compare."""


class BenchEngine(Protocol):
    """A loaded model that generates tokens, in this process or in another.

    ``name`` is shown in every row. ``load_seconds`` is the time from the start to the first
    request. ``versions`` are those of its packages.
    """

    name: str
    load_seconds: float
    versions: Mapping[str, str]

    def run(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Generate exactly ``lengths`` tokens for the prompts, greedily; return the seconds.

        Raises BenchError.
        """

    def step_details(self, prompts: list[list[int]], skipped: int, steps: int) -> dict[str, Any]:
        """Return more fields of a decode step's row: those that this engine can measure.

        They are means over ``steps`` steps after the first ``skipped`` output tokens.
        """

    def close(self) -> None:
        """Free the model's memory."""


def check_lengths(name: str, made: list[int], lengths: list[int]) -> None:
    """Raise BenchError if an engine generated more or fewer tokens than asked."""
    wrong = [pair for pair in zip(made, lengths, strict=True) if pair[0] != pair[1]]
    if wrong:
        got, asked = wrong[0]
        raise BenchError(
            f"{name}: {len(wrong)} of {len(lengths)} requests have the wrong number of tokens, "
            f"such as {got} instead of {asked}"
        )
