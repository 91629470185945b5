"""A model's forward pass as data: its distinct pieces, and the order in which they run.

The attention operator runs between the pieces. It reads what earlier pieces computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from kiln.cache.keys import digest_of
from kiln.engine.compile.code import Call, Value, assemble
from kiln.engine.compile.functions import function_of
from kiln.engine.errors import PieceError

NUM_TOKENS = "n"  # in shapes and strides
INPUTS = ("token_ids", "positions")  # the program's inputs that are not weights
PIECE = "piece "  # before the number of a piece, in the target of a call

Piecewise = Callable[..., Sequence[Any]]
Size = int | str  # "n" is the number of tokens


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a piece takes."""

    dtype: str
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    device: str


@dataclass(frozen=True)
class Piece:
    """What runs between two attention operators. Its inputs are the values 0, 1, and so on.

    It may write to its inputs. Weights are inputs too, so the layers of a model share a piece.
    """

    inputs: tuple[Input, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of its structure: equal pieces compute the same from equal inputs."""
        return digest_of(dumps(self)).hex()

    def function(self) -> Piecewise:
        """Return a function that runs the piece's calls one by one, as the model itself does."""
        return assemble(range(len(self.inputs)), self.calls, self.outputs, function_of)


@dataclass(frozen=True)
class Program:
    """``inputs`` names what it takes, from INPUTS and weights: its values 0, 1 and so on.

    ``steps`` call pieces and the attention operator; value ``output`` is the final hidden states.
    """

    inputs: tuple[str, ...]
    pieces: tuple[Piece, ...]
    steps: tuple[Call, ...]
    output: int

    def bind(
        self, functions: Sequence[Piecewise], weights: Mapping[str, torch.Tensor]
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return ``run(token_ids, positions)``, which calls ``functions``, one for each piece.

        It reads no value on the host, so a CUDA graph can be captured of it. Raises KeyError if a
        weight is missing.
        """
        parameters = [self.inputs.index(name) for name in INPUTS]
        weighted = enumerate(self.inputs)
        fixed = {number: weights[name] for number, name in weighted if name not in INPUTS}

        def target(name: str) -> Callable[..., Any]:
            if name.startswith(PIECE):
                return functions[int(name.removeprefix(PIECE))]
            return function_of(name)

        steps = assemble(parameters, self.steps, (self.output,), target, fixed)

        def run(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = steps(token_ids, positions)[0]
            return hidden

        return run


Saved = TypeVar("Saved", Program, Piece)


def dumps(part: Program | Piece) -> bytes:
    """Return a program or a piece as JSON text; equal ones give the same text.

    Raises PieceError if an argument of a call cannot be saved.
    """
    return json.dumps(_encode(part), separators=(",", ":")).encode()


def loads(kind: type[Saved], text: bytes) -> Saved:
    """Return the program or piece of ``dumps``. Raises PieceError if the text is none."""
    try:
        found = _decode(json.loads(text))
        if not isinstance(found, kind):
            raise TypeError(f"want a {kind.__name__}")
    except (KeyError, TypeError, ValueError) as error:
        raise PieceError(f"a saved program cannot be read: {error!r}") from error
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return found


# What JSON lacks is saved as an object of its kind and its parts, from which this makes it.
_KINDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "tuple": lambda *parts: parts,
        "dict": lambda *items: dict(items),
        "slice": slice,
        "dtype": _dtype,
        **{kind.__name__: kind for kind in (Value, Call, Input, Piece, Program)},
    }
)


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_encode(part) for part in value]
    kind, parts = _parts_of(value)
    return {kind: [_encode(part) for part in parts]}


def _parts_of(value: Any) -> tuple[str, Iterable[Any]]:
    if isinstance(value, tuple):
        return "tuple", value
    if isinstance(value, Mapping):
        return "dict", sorted(value.items())
    if isinstance(value, slice):
        return "slice", (value.start, value.stop, value.step)
    if isinstance(value, torch.dtype):
        return "dtype", [str(value).removeprefix("torch.")]
    if type(value) in _KINDS.values():
        return type(value).__name__, [getattr(value, field.name) for field in fields(value)]
    raise PieceError(f"a traced model passes {value!r} to an operator, which cannot be saved")


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(part) for part in data]
    if not isinstance(data, dict):
        return data
    ((kind, parts),) = data.items()
    return _KINDS[kind](*map(_decode, parts))
