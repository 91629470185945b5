"""Calls from rank 0 to the other ranks: the name of a method and its arguments, as JSON.

A follower lists the methods that rank 0 may call. It runs no others, and none with arguments of
other types than the method declares: ``str``, ``int``, ``float`` or ``list[int]``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import signature
from typing import Any, get_type_hints

# Declared, and what a call may give.
_TYPES = {str: (str,), int: (int,), float: (float, int), list[int]: (list,)}
_SHOWN = 80  # characters of a call in a message


def encode_call(method: Callable[..., object], *arguments: object) -> bytes:
    """Return a call as bytes. ``method``: that of the follower's class."""
    return json.dumps([method.__name__, *arguments]).encode()


class Calls:
    """The methods that rank 0 may call on this rank."""

    def __init__(self, *methods: Callable[..., object]) -> None:
        self._methods = {method.__name__: (method, _parameters(method)) for method in methods}
        assert len(self._methods) == len(methods), "two methods have the same name"

    def run(self, content: bytes) -> None:
        """Run a call. Raises ValueError for one that is not allowed, and what the method raises."""
        name, *arguments = json.loads(content)
        call = f"{name}({', '.join(map(repr, arguments))})"[:_SHOWN]
        if name not in self._methods:
            raise ValueError(
                f"rank 0 calls {call}, and this rank has only {', '.join(self._methods) or 'none'}:"
                " do all ranks run the same version of Kiln?"
            )
        method, declared = self._methods[name]
        if len(arguments) != len(declared) or not all(map(_has_type, arguments, declared.values())):
            wants = ", ".join(f"{one}: {_name(kind)}" for one, kind in declared.items())
            raise ValueError(f"rank 0 calls {call}, and this rank has {name}({wants})")
        method(*arguments)


def _has_type(given: object, wanted: Any) -> bool:
    if isinstance(given, list) and not all(type(one) is int for one in given):
        return False
    return type(given) in _TYPES[wanted]


def _name(kind: Any) -> str:
    return str(kind) if kind == list[int] else str(kind.__name__)


def _parameters(method: Callable[..., object]) -> dict[str, Any]:
    """Return the types of a method's parameters, by name."""
    hints = get_type_hints(method)
    return {name: hints[name] for name in signature(method).parameters}
