"""Run a package of AOTInductor, and compare it with the calls of its piece.

This is a program of its own: a bad package can end the process that loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import kiln.engine.lora.operators  # noqa: F401 (registers the operators)
from kiln.engine.compile.aot import load_package
from kiln.engine.compile.program import Piece, loads
from kiln.engine.compile.rebuild import empty
from kiln.engine.models.registry import known_families

_COUNTS = (1, 2, 33)  # tokens
_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided")


def main(arguments: Sequence[str]) -> str | int:
    """Return 0 if the package at a path does what a piece says, else a message.

    ``arguments``: the path of the piece's JSON, that of the package, and the device.
    """
    known_families()  # registers the operators of every model
    piece = loads(Piece, Path(arguments[0]).read_bytes())
    device = torch.device(arguments[2])
    with torch.inference_mode():
        run = load_package(Path(arguments[1]), device)
        return next(filter(None, (difference(piece, run, tokens) for tokens in _COUNTS)), 0)


def difference(piece: Piece, run: object, tokens: int) -> str:
    """Return how a function differs from the calls of a piece for some tokens, "" if it agrees."""
    torch.manual_seed(tokens)
    inputs = [empty(one, tokens) for one in piece.inputs]
    for tensor in inputs:
        tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
    copies = [tensor.clone() for tensor in inputs]
    assert callable(run)
    found, wanted = [*run(*inputs), *inputs], [*piece.function()(*copies), *copies]
    written = [number not in _unwritten(piece) for number in piece.outputs] + [True] * len(inputs)
    for own, other, compared in zip(found, wanted, written, strict=True):
        if own.shape != other.shape or own.dtype != other.dtype:
            return f"for {tokens} tokens a result is {own.dtype} {list(own.shape)}"
        if compared and own.is_floating_point():
            bound = torch.finfo(own.dtype).eps ** 0.5 * float(other.abs().max())
            error = float((own - other).abs().max())
            if not error <= bound:
                return f"for {tokens} tokens a result is off by {error:.2e}, at most {bound:.2e}"
    return ""


def _unwritten(piece: Piece) -> set[int]:
    """Return the values whose memory no call writes: the attention operator will."""
    made = {
        result
        for call in piece.calls
        if call.target.rpartition(".")[2] in _EMPTY
        for result in call.results
    }
    return made - {number for call in piece.calls for number in call.used()}
