"""Names of the functions that a traced graph calls, so that a graph can be saved as text.

Only operators and functions of torch and of ``operator`` have names: nothing else can be called
from a saved graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from kiln.engine.errors import PieceError

METHOD = "Tensor."  # before the name of a method of a tensor
_OPERATOR = "ops."
_SPACES: dict[str, Any] = {
    "operator.": operator,
    "torch.": torch._C._VariableFunctions,  # not what is written in Python, such as torch.load
    "torch.nn.functional.": torch.nn.functional,
    "torch._C._nn.": torch._C._nn,
}


def name_of(function: Any) -> str:
    """Return the name of a function or operator. Raises PieceError if it has none here."""
    if isinstance(function, torch._ops.OpOverload):
        return f"{_OPERATOR}{function}"
    own = getattr(function, "__name__", "")
    for prefix, space in _SPACES.items():
        if own and getattr(space, own, None) == function:
            return prefix + own
    raise PieceError(
        f"a traced model calls {function!r}, which cannot be saved: the model may call operators, "
        "methods of tensors, and functions of torch and torch.nn.functional"
    )


def function_of(name: str) -> Callable[..., Any]:
    """Return the function of a name. Raises PieceError if there is none."""
    found: Any = None
    if name.startswith(_OPERATOR):
        with suppress(AttributeError):
            found = operator.attrgetter(name.removeprefix(_OPERATOR))(torch.ops)
    elif name.startswith(METHOD):
        found = getattr(torch.Tensor, name.removeprefix(METHOD), None)
    else:
        space, _, own = name.rpartition(".")
        found = getattr(_SPACES.get(f"{space}."), own, None)
    if found is None:
        raise PieceError(f"a saved graph calls {name!r}, which this build of torch does not have")
    function: Callable[..., Any] = found
    return function


def schemas_of(names: list[str]) -> list[str]:
    """Return the schemas of the operators among some names, sorted."""
    wanted = {name for name in names if name.startswith(_OPERATOR)}
    return sorted(str(getattr(function_of(name), "_schema", "")) for name in wanted)
