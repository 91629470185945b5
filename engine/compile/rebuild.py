"""Make a graph for a compiler of a piece, with fake inputs that have any number of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from kiln.engine.compile.code import Value
from kiln.engine.compile.functions import METHOD, function_of
from kiln.engine.compile.program import NUM_TOKENS, Input, Piece

TOKENS = 37  # the compiler's example; results do not depend on it


def rebuild(piece: Piece) -> tuple[fx.GraphModule, list[Any]]:
    """Return the graph of a piece, and fake tensors for its inputs.

    The number of tokens is one symbol. Weights take no memory. Raises PieceError if the piece calls
    what this torch does not have.
    """
    from torch._dynamo.source import ConstantSource
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes, source = ShapeEnv(), ConstantSource("num_tokens")
    symbol = shapes.create_symbol(
        TOKENS, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
    )
    tokens = shapes.create_symintnode(symbol, hint=TOKENS, source=source)
    module = graph_of(piece)
    with FakeTensorMode(shape_env=shapes):
        inputs = [empty(one, tokens) for one in piece.inputs]
        _Annotate(module).run(*inputs)
    return module, inputs


def empty(one: Input, tokens: Any) -> torch.Tensor:
    """Return a tensor like an input of a piece, for a number of tokens."""
    shape: list[Any] = [tokens if size == NUM_TOKENS else size for size in one.shape]
    stride: list[Any] = [tokens if size == NUM_TOKENS else size for size in one.stride]
    return torch.empty_strided(shape, stride, dtype=getattr(torch, one.dtype), device=one.device)


def graph_of(piece: Piece) -> fx.GraphModule:
    """Return the calls of a piece as a graph of torch.fx."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"input_{number}") for number in range(len(piece.inputs))]
    values = dict(enumerate(nodes))

    def node_of(value: Any) -> Any:
        return values[value.number] if isinstance(value, Value) else value

    for call in piece.calls:
        args: Any = map_aggregate(call.args, node_of)
        kwargs: Any = map_aggregate(dict(call.kwargs), node_of)
        if call.target.startswith(METHOD):
            node = graph.call_method(call.target.removeprefix(METHOD), args, kwargs)
        else:
            node = graph.call_function(function_of(call.target), args, kwargs)
        values.update(dict.fromkeys(call.results, node))
    graph.output(tuple(values[number] for number in piece.outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


class _Annotate(fx.Interpreter):
    """Keeps the value of each node as Dynamo does; Inductor reads the shapes there."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one node on fake tensors, and keep what it gives."""
        value = super().run_node(n)
        n.meta["example_value"] = value
        return value
