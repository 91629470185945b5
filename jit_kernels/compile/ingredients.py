"""The inputs of a build, as an ordered list of labels and values. Their hash is the key.

They are exactly the inputs that can change a cubin: no local path, no time, no environment, no
driver. A cache entry stores the list, so that a miss can be explained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kiln.cache.keys import content_key
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.toolchains import nvrtc
from kiln.jit_kernels.toolchains.template import Unit

Ingredients = tuple[tuple[str, str], ...]


def ingredients_of(spec: KernelSpec, unit: Unit, arch: str, toolchain: str) -> Ingredients:
    """Return the inputs that determine a cubin; texts by their SHA-256.

    ``toolchain`` is the identity of the compiler.
    """
    return (
        ("kind", "cubin"),
        ("arch", arch),
        ("toolchain", toolchain),
        *(("option", option) for option in nvrtc.options(arch)),
        ("entry", spec.entry),
        ("program", unit.name),
        ("source", _digest(unit.text)),
        *((f"header {name}", _digest(text)) for name, text in unit.headers.items()),
    )


def key_of(ingredients: Ingredients) -> str:
    """Return the content key of a build: 64 hex digits."""
    return content_key((label, value.encode()) for label, value in ingredients)


def stored_ingredients(header: Any) -> Ingredients:
    """Return the ingredients in an entry's header. Raises ValueError if they are malformed."""
    listed = header.get("ingredients")
    if not isinstance(listed, list) or not all(_is_pair(pair) for pair in listed):
        raise ValueError("its header lists no ingredients")
    return tuple((label, value) for label, value in listed)


def value_of(ingredients: Ingredients, label: str) -> str:
    """Return the values of a label joined by spaces, "" if there are none."""
    return " ".join(value for own, value in ingredients if own == label)


def differing(wanted: Ingredients, found: Ingredients) -> list[str]:
    """Return the labels whose values differ, in the order of ``wanted``."""
    labels = dict.fromkeys(label for label, _ in (*wanted, *found))
    return [one for one in labels if value_of(wanted, one) != value_of(found, one)]


def _is_pair(pair: Sequence[Any]) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(p, str) for p in pair)


@lru_cache(maxsize=256)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
