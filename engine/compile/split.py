"""Split a traced graph at the attention operator, in the order of the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from kiln.engine.attention.operator import attention
from kiln.engine.compile.code import Call, Value
from kiln.engine.compile.functions import METHOD, name_of
from kiln.engine.compile.program import NUM_TOKENS, PIECE, Input, Piece, Program, Size
from kiln.engine.compile.trace import Traced
from kiln.engine.errors import PieceError


def split(traced: Traced) -> Program:
    """Return the program of a graph. Pieces of the same structure are one. Raises PieceError.

    Nothing is moved: the operators write to their arguments, so their order is part of the result.
    """
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    named = {
        node: name
        for node, name in zip(placeholders, traced.names, strict=True)
        if not _is_token_count(node)
    }
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    ((hidden,),) = output.args
    segments = _segments(traced.graph)
    inside = {node: segment for segment in segments for node in segment}
    numbers = {node: number for number, node in enumerate(named)}
    pieces: dict[str, tuple[int, Piece]] = {}
    steps: list[Call] = []
    for segment in segments:
        if _is_attention(segment[0]):
            steps.append(_call(segment[0], numbers, ()))
            continue
        needed = _needed(segment)
        made = [
            node for node in segment if any(inside.get(user) is not segment for user in node.users)
        ]
        piece = _piece(segment, needed, made)
        index, _ = pieces.setdefault(piece.digest, (len(pieces), piece))
        numbers.update({node: len(numbers) + offset for offset, node in enumerate(made)})
        arguments = tuple(Value(numbers[node]) for node in needed)
        results = tuple(numbers[node] for node in made)
        steps.append(Call(f"{PIECE}{index}", arguments, {}, results, unpack=True))
    distinct = tuple(piece for _, piece in pieces.values())
    return Program(tuple(named.values()), distinct, tuple(steps), numbers[hidden])


def _segments(graph: torch.fx.Graph) -> list[list[Node]]:
    """Return the graph's calls in order; each attention operator is alone."""
    segments: list[list[Node]] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if not segments or _is_attention(node) or _is_attention(segments[-1][0]):
            segments.append([])
        segments[-1].append(node)
    return segments


def _is_attention(node: Node) -> bool:
    return node.op == "call_function" and node.target is attention


def _needed(segment: Sequence[Node]) -> list[Node]:
    """Return the tensors that a segment reads from outside, in the order of first use."""
    found: dict[Node, None] = {}
    for node in segment:
        found.update(dict.fromkeys(node.all_input_nodes))
    own = set(segment)
    return [node for node in found if node not in own and not _is_token_count(node)]


def _piece(segment: Sequence[Node], needed: Sequence[Node], made: Sequence[Node]) -> Piece:
    numbers = {node: number for number, node in enumerate(needed)}
    inputs, calls = tuple(map(_input, needed)), []
    for count in {one: None for node in segment for one in node.all_input_nodes}:
        if _is_token_count(count):  # read from a tensor, so that a piece takes only tensors
            args = _place_of_tokens(inputs)
            numbers[count] = len(numbers)
            calls.append(Call(f"{METHOD}size", args, {}, (numbers[count],)))
    for node in segment:
        results: tuple[int, ...] = ()
        if node.users:
            numbers[node] = len(numbers)
            results = (numbers[node],)
        calls.append(_call(node, numbers, results))
    for node in made:
        _input(node)  # complain about what cannot be another piece's input
    return Piece(inputs, tuple(calls), tuple(numbers[node] for node in made))


def _place_of_tokens(inputs: Sequence[Input]) -> tuple[Value, int]:
    """Return an input, and which of its sizes is the number of tokens."""
    for number, one in enumerate(inputs):
        if NUM_TOKENS in one.shape:
            return Value(number), one.shape.index(NUM_TOKENS)
    raise PieceError(
        "a piece needs the number of tokens, but no tensor that it takes has that size"
    )


def _is_token_count(node: Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta["example_value"], torch.SymInt)


def _call(node: Node, numbers: Mapping[Node, int], results: tuple[int, ...]) -> Call:
    if node.op == "call_method":
        target = f"{METHOD}{node.target}"
    elif node.op == "call_function":
        target = name_of(node.target)
    else:
        raise PieceError(f"a traced model has a node {node.format_node()}, which cannot be saved")

    def numbered(one: Node) -> Any:
        return Value(numbers[one])

    args: Any = map_arg(node.args, numbered)
    kwargs: Any = map_arg(node.kwargs, numbered)
    return Call(target, args, kwargs, results)


def _input(node: Node) -> Input:
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor):
        kind = type(example).__name__
        raise PieceError(f"{node} of a traced model is a {kind}: only tensors leave a piece")
    return Input(
        str(example.dtype).removeprefix("torch."),
        tuple(map(_size, example.shape)),
        tuple(map(_size, example.stride())),
        str(example.device),
    )


def _size(size: int | torch.SymInt) -> Size:
    """Return a size; of those that change from step to step there is only the number of tokens."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if not expression.is_symbol:
        raise PieceError(f"a piece would have an input of size {expression}: want tokens alone")
    return NUM_TOKENS
