"""A model whose forward pass runs in compiled pieces, as KILN_COMPILE says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from kiln.cache.env import Env
from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.compile import aot, inductor
from kiln.engine.compile.artefacts import Artefacts
from kiln.engine.compile.keys import piece_ingredients, program_ingredients, target_of
from kiln.engine.compile.parameters import named_tensors
from kiln.engine.compile.program import Piece, Piecewise, Program, dumps, loads
from kiln.engine.compile.split import split
from kiln.engine.compile.trace import trace
from kiln.engine.errors import ConfigError
from kiln.engine.models.family import Model
from kiln.engine.models.loader import Progress

_STAGE = "compiled pieces"


class Compiler(Protocol):
    """Makes functions of pieces. What ``build`` returns is kept in the cache for later starts."""

    def build(self, piece: Piece, device: torch.device) -> bytes:
        """Compile a piece for any number of tokens. Raises PieceError."""

    def load(self, artefact: bytes, device: torch.device) -> Piecewise:
        """Return the function that ``build`` made; no compiler runs. Raises PieceError."""


_COMPILERS: Mapping[str, Compiler] = MappingProxyType({"inductor": inductor, "aot": aot})


class CompiledModel:
    """A model with another ``forward``: the same layers, in pieces."""

    def __init__(
        self, model: Model, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        self._model = model
        self._run = run

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The attention layers, in the order of their index."""
        return self._model.attention_layers

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [num_tokens, hidden_size]."""
        return self._run(token_ids, positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        return self._model.logits(hidden)


def compiled(model: Model, device: torch.device, env: Env, progress: Progress) -> Model:
    """Return the model as KILN_COMPILE wants it; "off" returns it as it is.

    What the cache holds is loaded without Dynamo, and without a compiler. Raises PieceError,
    SealedCacheError if the cache is sealed and lacks a piece, and ConfigError if toggles conflict.
    """
    if env.compile == "off":
        return model
    if env.cpu_graphs == "emulate" and device.type == "cpu" and env.compile != "eager":
        raise ConfigError(
            f"KILN_CPU_GRAPHS=emulate cannot record what runs inside a compiled piece: unset it, "
            f"or set KILN_COMPILE=eager instead of {env.compile}"
        )
    artefacts = Artefacts(env, target_of(device))
    program, functions = build(model, device, env.compile, artefacts, progress)
    return CompiledModel(model, program.bind(functions, named_tensors(model)))


def build(
    model: Model, device: torch.device, mode: str, artefacts: Artefacts, progress: Progress
) -> tuple[Program, list[Piecewise]]:
    """Return the program of a model, and the function of each of its pieces.

    Only the structure of the model is read, never its weights. Raises PieceError and
    SealedCacheError.
    """

    def trace_and_split() -> bytes:
        progress("tracing", 0, 1)
        text = dumps(split(trace(model, device)))
        progress("tracing", 1, 1)
        return text

    ingredients = program_ingredients(model)
    text = artefacts.get("program of a model", ingredients, trace_and_split)
    program = loads(Program, text)
    functions = []
    for done, piece in enumerate(program.pieces):
        progress(_STAGE, done, len(program.pieces))
        functions.append(_function(piece, device, mode, artefacts))
    progress(_STAGE, len(functions), len(functions))
    return program, functions


def _function(piece: Piece, device: torch.device, mode: str, artefacts: Artefacts) -> Piecewise:
    if mode == "eager":
        return piece.function()
    compiler = _COMPILERS[mode]
    artefact = artefacts.get(
        f"{mode} piece {piece.digest[:12]}",
        piece_ingredients(piece, mode, inductor.OPTIONS, device),
        lambda: compiler.build(piece, device),
    )
    return compiler.load(artefact, device)
