"""The tensors of a model by name, and a text of everything else that a trace depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.errors import PieceError

_LEAVES = (
    *(bool, int, float, str, type(None), torch.dtype, torch._ops.OpOverload, AttentionLayer),
)


def named_tensors(model: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by name, such as ``blocks.3.mlp.down.weight``.

    What belongs to an attention layer is left out: the attention operator reads it.
    """
    return {name: leaf for name, leaf in _leaves(model) if isinstance(leaf, torch.Tensor)}


def parts_of(model: object, kind: type) -> Iterator[Any]:
    """Yield the outermost parts of a model that are of a class."""
    if isinstance(model, kind):
        yield model
    elif isinstance(model, list | tuple):
        yield from (found for one in model for found in parts_of(one, kind))
    elif dataclasses.is_dataclass(model) and not isinstance(model, type):
        for field in dataclasses.fields(model):
            yield from parts_of(getattr(model, field.name), kind)
    elif type(model).__module__.startswith("kiln.") and hasattr(model, "__dict__"):
        yield from (found for one in vars(model).values() for found in parts_of(one, kind))


def structure_of(model: object) -> list[str]:
    """Return a line for every number, text, operator and tensor in a model.

    Models of the same structure have the same trace. Raises PieceError if a part is of another
    kind.
    """
    return [f"{name} = {_shown(name, leaf)}" for name, leaf in _leaves(model)]


def _leaves(part: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of everything that has no parts; of an object also its class."""
    if isinstance(part, list | tuple):
        named: Any = enumerate(part)
    elif dataclasses.is_dataclass(part) and not isinstance(part, AttentionLayer):
        named = ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))
    elif type(part).__module__.startswith("kiln.") and hasattr(part, "__dict__"):
        named = vars(part).items()
    else:
        yield name, part
        return
    yield f"{name}:", type(part).__qualname__
    for own, value in named:
        yield from _leaves(value, f"{name}.{own}" if name else str(own))


def _shown(name: str, leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)} {leaf.stride()} on {leaf.device}"
    if isinstance(leaf, AttentionLayer):
        return f"attention {leaf.index} {leaf.shape}"
    if isinstance(leaf, _LEAVES):
        return repr(leaf) if not isinstance(leaf, torch._ops.OpOverload) else str(leaf._schema)
    raise PieceError(f"{name} of the model is a {type(leaf).__qualname__}: pieces cannot hold one")
