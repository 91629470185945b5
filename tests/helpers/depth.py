"""How deep the tests go: few cases of each rule in `make test`, many in `make test-deep`."""

from __future__ import annotations

import random
from typing import TypeVar

import pytest

Value = TypeVar("Value")

_depth = {"deep": False}


def at_depth(quick: Value, deep: Value) -> Value:
    """Return ``deep`` under ``--deep``, else ``quick``: numbers of trials, lists of cases."""
    return deep if _depth["deep"] else quick


def set_depth(deep: bool) -> None:
    """Choose the depth, before any test file is imported."""
    _depth["deep"] = deep


def choose(
    items: list[pytest.Item], share: float, seed: int
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split the tests into those that run and the rest.

    Tests with the marker ``deep`` run under ``--deep`` alone. A share below 1 draws that part of
    all tests at random: each process that collects the same tests draws the same ones.
    """
    kept = [one for one in items if _depth["deep"] or one.get_closest_marker("deep") is None]
    if share < 1:
        drawn = random.Random(seed).sample(range(len(kept)), round(share * len(kept)))
        kept = [kept[index] for index in sorted(drawn)]
    chosen = set(kept)
    return kept, [one for one in items if one not in chosen]
