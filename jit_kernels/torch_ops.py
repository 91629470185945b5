"""Registers torch.ops.kiln.<name> for every spec.

``implementations`` chooses what runs on CUDA and on the CPU. With fake tensors nothing runs: every
operator only writes to its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kiln.jit_kernels.declare import catalog
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.implementations import run

_NAMESPACE = "kiln"


def define(specs: Sequence[KernelSpec]) -> None:
    """Register the operators of some specs. Raises ValueError if a name is taken."""
    catalog.add(specs)
    for spec in specs:
        name = f"{_NAMESPACE}::{spec.name}"
        torch.library.define(name, spec.parameters.schema)
        for device in ("CPU", "CUDA"):
            torch.library.impl(name, device, partial(_run, spec))
        torch.library.register_fake(name, _nothing)


def call(spec: KernelSpec, /, **arguments: Any) -> None:
    """Run the operator of a spec on its arguments, given by name.

    Raises TypeError if one is missing or unknown.
    """
    getattr(torch.ops.kiln, spec.name)(*spec.parameters.positional(arguments))


def _run(spec: KernelSpec, *arguments: Any) -> None:
    run(spec, spec.parameters.named(arguments))


def _nothing(*arguments: Any) -> None:
    """Implement an operator for fake tensors: it returns nothing, and its outputs are arguments."""
