"""torch.ops.kiln.<name> for every spec: one operator, whose device decides what runs.

CUDA runs what the family's toggle chose; CPU runs the reference, or the kernel's own source under
``KILN_CPU_KERNELS``; fake tensors run nothing, for every operator only writes its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kiln.jit_kernels import catalog
from kiln.jit_kernels.dispatch import run_on_cpu, run_on_cuda
from kiln.jit_kernels.spec import KernelSpec

_NAMESPACE = "kiln"


def define(specs: Sequence[KernelSpec]) -> None:
    """Register the operators of some specs. Raises ValueError when a name is taken."""
    catalog.add(specs)
    for spec in specs:
        name = f"{_NAMESPACE}::{spec.name}"
        torch.library.define(name, spec.parameters.schema)
        torch.library.impl(name, "CPU", partial(_with_names, run_on_cpu, spec))
        torch.library.impl(name, "CUDA", partial(_with_names, run_on_cuda, spec))
        torch.library.register_fake(name, _nothing)


def call(spec: KernelSpec, /, **arguments: Any) -> None:
    """Run the operator of a spec on its arguments, given by name.

    Raises TypeError unless they are just what the spec lists.
    """
    getattr(torch.ops.kiln, spec.name)(*spec.parameters.positional(arguments))


def _with_names(run: Any, spec: KernelSpec, *arguments: Any) -> None:
    run(spec, spec.parameters.named(arguments))


def _nothing(*arguments: Any) -> None:
    """Stand in for an operator on fake tensors: its results are its arguments."""
