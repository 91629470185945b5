"""A model's forward pass as data: its distinct pieces, and the order in which they run.

The attention operator runs between the pieces. It reads what earlier pieces computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kiln.cache.keys import digest_of
from kiln.engine.compile.code import Call, assemble
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
        return digest_of(_dump(self.to_json())).hex()

    def to_json(self) -> dict[str, Any]:
        """Return the piece as JSON. Raises PieceError if it cannot be saved."""
        inputs = [[one.dtype, list(one.shape), list(one.stride), one.device] for one in self.inputs]
        calls = [call.to_json() for call in self.calls]
        return {"inputs": inputs, "calls": calls, "outputs": list(self.outputs)}

    @classmethod
    def from_json(cls, data: Any) -> Piece:
        """Return the piece that ``to_json`` wrote. Raises as ``Program.loads`` does inside."""
        inputs = tuple(
            Input(dtype, tuple(shape), tuple(stride), device)
            for dtype, shape, stride, device in data["inputs"]
        )
        return cls(inputs, tuple(map(Call.from_json, data["calls"])), tuple(data["outputs"]))

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

    def dumps(self) -> bytes:
        """Return the program as JSON text; equal programs give the same bytes."""
        steps, pieces = [s.to_json() for s in self.steps], [p.to_json() for p in self.pieces]
        return _dump(
            {"inputs": list(self.inputs), "pieces": pieces, "steps": steps, "output": self.output}
        )

    @classmethod
    def loads(cls, text: bytes) -> Program:
        """Return the program of ``dumps``. Raises PieceError if the text is no program."""
        try:
            data = json.loads(text)
            pieces = tuple(map(Piece.from_json, data["pieces"]))
            steps = tuple(map(Call.from_json, data["steps"]))
            return cls(tuple(data["inputs"]), pieces, steps, data["output"])
        except (KeyError, TypeError, ValueError) as error:
            raise PieceError(f"a saved program cannot be read: {error!r}") from error

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


def _dump(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
