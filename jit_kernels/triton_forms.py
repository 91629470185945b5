"""The Triton implementations that a toggle can choose; a family may have none."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from kiln.jit_kernels.declare.errors import NoSuchKernel
from kiln.jit_kernels.declare.parameters import Arguments

_OPS = Path(__file__).parent / "ops"


def has_triton(family: str) -> bool:
    """Return whether Triton is installed and the family has Triton forms; imports neither."""
    return (
        importlib.util.find_spec("triton") is not None and (_OPS / family / "triton.py").is_file()
    )


def triton_form(family: str, name: str) -> Callable[[Arguments], None]:
    """Return the Triton form of an operator: it takes the same arguments and writes in place.

    Raises NoSuchKernel if Triton is not installed or the operator has no Triton form.
    """
    if not has_triton(family):
        raise NoSuchKernel(f"Triton is not installed, or {family} has no Triton forms")
    form = getattr(importlib.import_module(f"kiln.jit_kernels.ops.{family}.triton"), name, None)
    if form is None:
        raise NoSuchKernel(f"{name} has no Triton form")
    return form  # type: ignore[no-any-return]
