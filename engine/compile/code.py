"""Straight-line code as data: calls in order, whose arguments and results are numbered values.

It can be compared, saved (see ``program``), and made into a Python function without tracing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx.node import map_aggregate


@dataclass(frozen=True, slots=True)
class Value:
    """A value by its number."""

    number: int

    def __repr__(self) -> str:
        """Its name in the code that ``assemble`` writes."""
        return f"v{self.number}"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the function named ``target``.

    Arguments are Values, numbers, texts, None, dtypes, and lists, tuples and slices of these. The
    result is value ``results[0]``, or with ``unpack`` a sequence of as many values. Without
    ``results`` it is not kept.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int, ...]
    unpack: bool = False

    def used(self) -> Iterator[int]:
        """Yield the number of every value among the arguments."""
        leaves: list[Any] = []
        map_aggregate((self.args, dict(self.kwargs)), leaves.append)
        yield from (leaf.number for leaf in leaves if isinstance(leaf, Value))


def assemble(
    parameters: Sequence[int],
    calls: Sequence[Call],
    outputs: Sequence[int],
    functions: Callable[[str], Callable[..., Any]],
    fixed: Mapping[int, Any] = MappingProxyType({}),
) -> Callable[..., tuple[Any, ...]]:
    """Return a Python function of ``parameters`` that makes the calls and returns ``outputs``.

    ``functions`` maps a target to what is called; ``fixed`` holds values that never change. A value
    is released after its last use, so the function needs no more memory than code by hand.
    """
    # What an argument's repr may name, and the values that do not change.
    names: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan}
    names |= {f"v{number}": value for number, value in fixed.items()}
    dead = _last_uses(calls, {*outputs, *fixed})
    lines = [f"def run({', '.join(f'v{number}' for number in parameters)}):"]
    for call, over in zip(calls, dead, strict=True):
        names[function := f"f{len(names)}"] = functions(call.target)
        args = list(map(repr, call.args))
        args += [f"{name}={value!r}" for name, value in call.kwargs.items()]
        results = ", ".join(f"v{number}" for number in call.results)
        target = f"{results}{',' * call.unpack} = " if call.results else ""
        lines.append(f"    {target}{function}({', '.join(args)})")
        if over:
            lines.append("    del " + ", ".join(f"v{number}" for number in over))
    lines.append(f"    return ({''.join(f'v{number}, ' for number in outputs)})")
    exec(compile("\n".join(lines), "<kiln piece>", "exec"), names)
    run: Callable[..., tuple[Any, ...]] = names["run"]
    return run


def _last_uses(calls: Sequence[Call], kept: set[int]) -> list[list[int]]:
    """Return for each call the values that nobody uses after it."""
    last: dict[int, int] = {}
    for index, call in enumerate(calls):
        last.update(dict.fromkeys((*call.used(), *call.results), index))
    dead: list[list[int]] = [[] for _ in calls]
    for number, index in last.items():
        if number not in kept:
            dead[index].append(number)
    return dead
