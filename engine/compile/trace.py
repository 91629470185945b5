"""Trace a model's forward pass with Dynamo: one graph for any number of tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kiln.engine.compile.parameters import named_tensors
from kiln.engine.errors import PieceError
from kiln.engine.models.family import Model

_TOKENS = 37  # of the traced step: unlike every other size, so that it is not taken for one


class Traced(NamedTuple):
    """A graph, and for each of its placeholders a name: one of program.INPUTS, or a weight's.

    The number of tokens is a placeholder too, named "num_tokens".
    """

    graph: torch.fx.Graph
    names: tuple[str, ...]


def trace(model: Model, device: torch.device) -> Traced:
    """Trace ``model.forward`` without running it. Raises PieceError if Dynamo cannot.

    The weights are inputs of the graph; so is the number of tokens, which is never a constant.
    """
    import torch._dynamo
    from torch._C._dynamo.eval_frame import reset_code
    from torch.fx.experimental import _config

    shapes: Any = _config  # its functions are added when it is imported

    token_ids = torch.zeros(_TOKENS, dtype=torch.int64, device=device)
    positions = torch.zeros(_TOKENS, dtype=torch.int64, device=device)
    known = {id(tensor): name for name, tensor in reversed(named_tensors(model).items())}
    known |= {id(token_ids): "token_ids", id(positions): "positions"}
    for tensor in (token_ids, positions):
        torch._dynamo.mark_dynamic(tensor, 0)
    traced: list[tuple[torch.fx.Graph, list[Any]]] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        traced.append((graph.graph, inputs))
        return lambda *arguments: (torch.empty(0, device=device),)  # nobody reads the result

    forward = type(model).forward
    try:
        # Without the option torch takes one token for a constant, and traces again for it. With
        # dynamic=False nothing else changes, although it differs in a model traced before.
        with torch.inference_mode(), shapes.patch(backed_size_oblivious=True):
            compiled = torch.compile(model.forward, backend=keep, fullgraph=True, dynamic=False)
            compiled(token_ids, positions)
    except Exception as error:
        raise PieceError(f"torch.compile cannot trace the model: {error}") from error
    finally:
        reset_code(forward.__code__)  # it would keep every model traced
    graph, inputs = traced.pop()  # torch keeps ``keep``, and would keep the weights with it
    assert not traced, "fullgraph gives one graph"
    _check_sizes(graph)
    return Traced(graph, tuple(_name(one, known) for one in inputs))


def _check_sizes(graph: torch.fx.Graph) -> None:
    """Raise PieceError if the graph holds only for some numbers of tokens: nobody would ask."""
    values = (node.meta.get("example_value") for node in graph.nodes)
    fake = next(value for value in values if isinstance(value, torch.Tensor))
    guards = [guard.expr for guard in fake.fake_mode.shape_env.guards]  # type: ignore[attr-defined]
    for guard in guards:  # there are as many positions as tokens
        is_equation = getattr(guard, "rel_op", "") == "=="
        if not (is_equation and guard.lhs.is_symbol and guard.rhs.is_symbol):
            raise PieceError(
                f"the model's forward pass depends on how many tokens a step has ({guard}): such a "
                "model cannot be split into pieces; set KILN_COMPILE=off"
            )


def _name(example: Any, known: dict[int, str]) -> str:
    if isinstance(example, torch.Tensor):
        if id(example) in known:
            return known[id(example)]
        raise PieceError(
            f"the traced model reads a tensor {list(example.shape)} that is no part of it"
        )
    return "num_tokens"
