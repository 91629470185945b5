"""How deep the tests go: few cases of each rule in `make test`, many in `make test-deep`."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

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
    items: Sequence[pytest.Item], share: float, seed: int
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split the tests into those that run and the rest.

    Tests marked ``deep`` run under ``--deep`` alone; so do most cases of a test marked ``quick``. A
    share below 1 draws that part of all tests at random: each process that collects the same tests
    draws the same ones.
    """
    kept = list(items) if _depth["deep"] else _quick(items)
    if share < 1:
        drawn = random.Random(seed).sample(range(len(kept)), round(share * len(kept)))
        kept = [kept[index] for index in sorted(drawn)]
    chosen = set(kept)
    return kept, [one for one in items if one not in chosen]


def _quick(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Leave out the tests marked ``deep``, and cases of those marked ``quick(most)``."""
    kept, cases = [], defaultdict(list)
    for one in items:
        if one.get_closest_marker("deep") is None:
            cases[one.nodeid.partition("[")[0]].append(one)
    for of_one_test in cases.values():
        marker = of_one_test[0].get_closest_marker("quick")
        kept += of_one_test if marker is None else spread(of_one_test, *marker.args)
    return kept


def spread(cases: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` cases: first those that show another value of a parameter."""
    seen: set[tuple[str, int]] = set()
    telling = []
    for one in cases:
        shown = set(one.callspec.indices.items())
        if shown - seen:
            seen |= shown
            telling.append(one)
    most = min(most, len(telling))
    return [telling[index * len(telling) // most] for index in range(most)]
