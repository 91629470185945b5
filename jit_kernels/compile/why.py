"""Explain a cache miss: find the nearest entry and the ingredients that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kiln.cache.disk.entry import Entry
from kiln.jit_kernels.compile.ingredients import (
    Ingredients,
    differing,
    stored_ingredients,
    value_of,
)

_SHOWN = 16  # characters shown of a digest
_MEANING = {
    "source": "the template, or the values of its parameters",
    "toolchain": "another NVRTC",
    "option": "compiler options",
    "arch": "the target",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One ingredient: its value here and in the nearest entry; "" if it is absent."""

    label: str
    wanted: str
    found: str

    def __str__(self) -> str:
        meaning = _MEANING.get(self.label)
        told = f"{self.label} ({meaning})" if meaning else self.label
        wanted, found = _apart(self.wanted, self.found)
        return f"{told}: {wanted} here, {found} there"


@dataclass(frozen=True, slots=True)
class Nearest:
    """The entry nearest to a build, its location, and the differences."""

    where: str
    kernel: str
    arch: str
    differences: tuple[Difference, ...]

    def sentence(self) -> str:
        """Return a sentence for error messages."""
        told = "; ".join(map(str, self.differences)) or "nothing differs"
        return f"the nearest entry is {self.kernel} for {self.arch} in {self.where}; {told}"


def nearest(
    kernel: str,
    variant: Mapping[str, str],
    wanted: Ingredients,
    candidates: Iterable[tuple[str, Entry]],
) -> Nearest | None:
    """Return the entry nearest to a build, or None if there are no candidates.

    The same kernel and variant rank first, then the fewest different ingredients.
    """
    best: tuple[tuple[bool, bool, int], Nearest] | None = None
    for where, entry in candidates:
        try:
            found = stored_ingredients(entry.header)
        except ValueError:  # an entry of another program
            continue
        name, values = str(entry.header.get("kernel")), entry.header.get("variant")
        differences = _differences(wanted, found)
        rank = (name != kernel, values != variant, len(differences))
        if best is None or rank < best[0]:
            if values != variant:
                differences.insert(0, Difference("variant", _words(variant), _words(values)))
            best = rank, Nearest(where, name, value_of(found, "arch"), tuple(differences))
    return best[1] if best else None


def _differences(wanted: Ingredients, found: Ingredients) -> list[Difference]:
    labels = differing(wanted, found)
    if "arch" in labels and "option" in labels:  # the target is also an option
        labels.remove("option")
    return [Difference(one, value_of(wanted, one), value_of(found, one)) for one in labels]


def _words(variant: object) -> str:
    if not isinstance(variant, Mapping):
        return "unknown"
    return ",".join(f"{name}={value}" for name, value in sorted(variant.items())) or "none"


def _apart(one: str, other: str) -> tuple[str, str]:
    """Shorten two different values; keep the parts that differ."""
    if not one or not other:
        return one or "nothing", other or "nothing"
    mine, theirs = one.split(), other.split()
    if len(mine) > 1 or len(theirs) > 1:  # options: show those that the other lacks
        here = " ".join(word for word in mine if word not in theirs)
        there = " ".join(word for word in theirs if word not in mine)
        return (here or "nothing", there or "nothing") if here or there else (one, other)
    if max(len(one), len(other)) <= _SHOWN:
        return one, other
    same = next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), 0
    )
    start = max(same - 4, 0)
    cut = [f"{'…' if start else ''}{text[start : start + _SHOWN]}…" for text in (one, other)]
    return cut[0], cut[1]
