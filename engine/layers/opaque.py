"""Operators of Kiln's that torch.compile does not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _nothing(*arguments: object) -> None:
    """Do nothing on fake tensors: the results are arguments."""


def opaque_operator(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any] | None = _nothing
) -> Any:
    """Register torch.ops.kiln.<name>, which calls ``run`` on any device, and return it.

    ``schema`` is torch.library's, with the name in front. ``fake`` is called with fake tensors; the
    default is for operators that only write to arguments. None: it is never traced.
    """
    name, bracket, types = schema.partition("(")
    torch.library.define(f"kiln::{name}", bracket + types)
    torch.library.impl(f"kiln::{name}", ("CPU", "CUDA"), run)
    if fake is not None:
        torch.library.register_fake(f"kiln::{name}", fake)
    return getattr(torch.ops.kiln, name).default
