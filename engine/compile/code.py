"""Straight-line code as data: calls in order, whose arguments and results are numbered values.

It can be saved as JSON, compared by its text, and made into a Python function. Tracing is not
needed for either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from kiln.engine.errors import PieceError


@dataclass(frozen=True, slots=True)
class Value:
    """A value by its number."""

    number: int


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
        yield from _numbers((self.args, tuple(self.kwargs.values())))

    def to_json(self) -> list[Any]:
        """Return the call as JSON. Raises PieceError if an argument cannot be saved."""
        kwargs = {name: _encode(value) for name, value in self.kwargs.items()}
        args = [_encode(value) for value in self.args]
        return [self.target, args, kwargs, list(self.results), self.unpack]

    @classmethod
    def from_json(cls, data: Any) -> Call:
        """Return the call that ``to_json`` wrote. Raises PieceError and ValueError if malformed."""
        target, args, kwargs, results, unpack = data
        named = {name: _decode(value) for name, value in kwargs.items()}
        return cls(target, tuple(map(_decode, args)), named, tuple(results), unpack)


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
    names: dict[str, Any] = {f"v{number}": value for number, value in fixed.items()}
    dead = _last_uses(parameters, calls, {*outputs, *fixed})
    lines = [f"def run({', '.join(f'v{number}' for number in parameters)}):"]
    for call, over in zip(calls, dead, strict=True):
        names[function := f"f{len(names)}"] = functions(call.target)
        args = [_text(value, names) for value in call.args]
        args += [f"{name}={_text(value, names)}" for name, value in call.kwargs.items()]
        results = ", ".join(f"v{number}" for number in call.results)
        target = f"{results}{',' * call.unpack} = " if call.results else ""
        lines.append(f"    {target}{function}({', '.join(args)})")
        if over:
            lines.append("    del " + ", ".join(f"v{number}" for number in over))
    lines.append(f"    return ({''.join(f'v{number}, ' for number in outputs)})")
    exec(compile("\n".join(lines), "<kiln piece>", "exec"), names)
    run: Callable[..., tuple[Any, ...]] = names["run"]
    return run


def _last_uses(parameters: Iterable[int], calls: Sequence[Call], kept: set[int]) -> list[list[int]]:
    """Return for each call the values that nobody uses after it."""
    last: dict[int, int] = {}
    for index, call in enumerate(calls):
        last.update(dict.fromkeys((*call.used(), *call.results), index))
    dead: list[list[int]] = [[] for _ in calls]
    for number, index in last.items():
        if number not in kept:
            dead[index].append(number)
    return dead


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, Value):
        yield value.number
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, slice):
        yield from _numbers((value.start, value.stop, value.step))


def _text(value: Any, names: dict[str, Any]) -> str:
    """Return an argument as Python; constants get a name each."""
    if isinstance(value, Value):
        return f"v{value.number}"
    if isinstance(value, list):
        return f"[{', '.join(_text(part, names) for part in value)}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{_text(part, names)}, ' for part in value)})"
    if isinstance(value, slice):
        names[name := "slice"] = slice
        return f"{name}{_text((value.start, value.stop, value.step), names)}"
    names[name := f"k{len(names)}"] = value
    return name


def _encode(value: Any) -> Any:
    if isinstance(value, Value):
        return {"value": value.number}
    if isinstance(value, tuple):
        return {"tuple": [_encode(part) for part in value]}
    if isinstance(value, list):
        return [_encode(part) for part in value]
    if isinstance(value, slice):
        return {"slice": [_encode(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise PieceError(f"a traced model passes {value!r} to an operator, which cannot be saved")


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(part) for part in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "value":
        return Value(content)
    if kind == "tuple":
        return tuple(map(_decode, content))
    if kind == "slice":
        return slice(*map(_decode, content))
    if kind == "dtype" and isinstance(found := getattr(torch, content, None), torch.dtype):
        return found
    raise PieceError(f"a saved graph holds {data!r}, which has no meaning")
