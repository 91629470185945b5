"""The parameters of a kernel and its operator, declared once.

The declaration has the order and the names of the signature in the ``.cu`` file.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import torch

Type = Literal["pointer", "int64", "int32", "float", "bool"]
KernelValue: TypeAlias = "torch.Tensor | int | float | None"
Arguments: TypeAlias = Any  # a call's arguments: an instance of the namedtuple of its spec

_SCHEMA_TYPES = {"pointer": "Tensor", "int64": "int", "int32": "int"}
_C_TYPES = {"bool": "int32"}


class Role(Enum):
    """The role of a parameter; see the functions below."""

    INPUT = auto()
    OUTPUT = auto()
    IN_OUT = auto()
    SCRATCH = auto()
    OPTIONAL = auto()
    VALUE = auto()
    DERIVED = auto()
    OPERATOR_ONLY = auto()


_RESULTS = (Role.OUTPUT, Role.IN_OUT)
_MUTATED = (*_RESULTS, Role.SCRATCH)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel, of its operator, or of both."""

    name: str
    type: Type
    role: Role


def inputs(*names: str) -> list[Parameter]:
    """Return tensors that are read."""
    return _tensors(Role.INPUT, names)


def outputs(*names: str) -> list[Parameter]:
    """Return tensors that are written; tests fill them with NaN first."""
    return _tensors(Role.OUTPUT, names)


def in_outs(*names: str) -> list[Parameter]:
    """Return tensors that are read and written, such as an accumulator."""
    return _tensors(Role.IN_OUT, names)


def scratch(*names: str) -> list[Parameter]:
    """Return memory that is written but is not a result."""
    return _tensors(Role.SCRATCH, names)


def optional(*names: str) -> list[Parameter]:
    """Return tensors that are read, or None, which the kernel gets as a null pointer."""
    return _tensors(Role.OPTIONAL, names)


def values(kind: Type, *names: str) -> list[Parameter]:
    """Return numbers of the operator that the kernel gets unchanged."""
    return [Parameter(name, kind, Role.VALUE) for name in names]


def derived(kind: Type, *names: str) -> list[Parameter]:
    """Return kernel arguments that ``bind`` computes, such as strides; "pointer" for a tensor."""
    return [Parameter(name, kind, Role.DERIVED) for name in names]


def operator_only(kind: Type, *names: str) -> list[Parameter]:
    """Return operator arguments that the kernel does not get; ``bind`` may use them."""
    return [Parameter(name, kind, Role.OPERATOR_ONLY) for name in names]


def _tensors(role: Role, names: Sequence[str]) -> list[Parameter]:
    return [Parameter(name, "pointer", role) for name in names]


class Parameters:
    """A kernel's parameters in order, and data derived from them.

    ``schema`` is the operator's schema for torch.library, ``c_types`` are the kernel's types, and
    ``Arguments`` is the namedtuple of the operator's arguments. ``names``, ``outputs``, ``results``
    (the reference's results), ``mutated`` and ``derived`` are names in order. Raises ValueError on
    a name that occurs twice or is no identifier.
    """

    def __init__(self, listed: Sequence[Parameter]) -> None:
        self.listed = tuple(listed)
        taken = [one for one in listed if one.role is not Role.DERIVED]
        self.passed = tuple(one for one in listed if one.role is not Role.OPERATOR_ONLY)
        self.names = tuple(one.name for one in taken)
        self.outputs = self._of(Role.OUTPUT)
        self.results = self._of(*_RESULTS)
        self.mutated = self._of(*_MUTATED)
        self.derived = self._of(Role.DERIVED)
        self.c_types = tuple(_C_TYPES.get(one.type, one.type) for one in self.passed)
        self.schema = _schema(taken)
        self.Arguments: Callable[..., Arguments] = namedtuple("Arguments", self.names)  # type: ignore[misc]
        # Like Arguments(*values), in a third of the time, without a check of the count.
        self.named: Callable[[Sequence[Any]], Arguments] = partial(tuple.__new__, self.Arguments)
        self.first_tensor = next(
            place
            for place, one in enumerate(taken)
            if one.type == "pointer" and one.role is not Role.OPTIONAL
        )
        every = (*self.names, *self.derived)  # namedtuple has already checked self.names
        if len(set(every)) < len(every):
            raise ValueError(f"a parameter is listed twice: {', '.join(every)}")
        self._take_derived = _picker(self.derived)
        self._order = _picker([every.index(one.name) for one in self.passed])

    def _of(self, *roles: Role) -> tuple[str, ...]:
        return tuple(one.name for one in self.listed if one.role in roles)

    def positional(self, named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the operator's arguments in order. Raises TypeError on a missing or extra name."""
        if len(named) == len(self.names):
            try:
                # torch.compile traces this; it does not support itemgetter.
                return tuple([named[name] for name in self.names])
            except KeyError:
                pass  # the error below lists all missing names
        missing = [name for name in self.names if name not in named]
        unknown = [name for name in named if name not in self.names]
        raise TypeError(f"arguments missing: {missing}; unknown: {unknown}; want {self.schema}")

    def kernel_values(
        self, a: Arguments, derived: Mapping[str, KernelValue]
    ) -> tuple[KernelValue, ...]:
        """Return the kernel's arguments in the order of its signature."""
        return self._order(a + self._take_derived(derived))


def declare(*groups: Sequence[Parameter]) -> Parameters:
    """Return the parameters of a kernel from groups in the order of its signature."""
    return Parameters([one for group in groups for one in group])


def _schema(taken: Sequence[Parameter]) -> str:
    parts, marks = [], iter("abcdefghijklmnopqrstuvwxyz")
    for one in taken:
        kind = _SCHEMA_TYPES.get(one.type, one.type)
        if one.role in _MUTATED:
            kind += f"({next(marks)}!)"
        elif one.role is Role.OPTIONAL:
            kind += "?"
        parts.append(f"{kind} {one.name}")
    return f"({', '.join(parts)}) -> ()"


def _picker(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns these keys' values of a mapping or sequence as a tuple."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda source: tuple(source[key] for key in keys)
