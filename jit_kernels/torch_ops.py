"""torch.ops.kiln.<name> for every spec: one operator, whose device decides what runs.

What runs on CUDA and on the CPU is decided by ``implementations``; fake tensors run nothing, for
every operator only writes its arguments.
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
    """Register the operators of some specs. Raises ValueError when a name is taken."""
    catalog.add(specs)
    for spec in specs:
        name = f"{_NAMESPACE}::{spec.name}"
        torch.library.define(name, spec.parameters.schema)
        for device in ("CPU", "CUDA"):
            torch.library.impl(name, device, partial(_run, spec))
        torch.library.register_fake(name, _nothing)


def call(spec: KernelSpec, /, **arguments: Any) -> None:
    """Run the operator of a spec on its arguments, given by name.

    Raises TypeError unless they are just what the spec lists.
    """
    getattr(torch.ops.kiln, spec.name)(*spec.parameters.positional(arguments))


def _run(spec: KernelSpec, *arguments: Any) -> None:
    run(spec, spec.parameters.named(arguments))


def _nothing(*arguments: Any) -> None:
    """Stand in for an operator on fake tensors: its results are its arguments."""
