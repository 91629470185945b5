"""What runs when an operator is called, on each device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

from kiln.jit_kernels.choose import choice
from kiln.jit_kernels.errors import KernelError
from kiln.jit_kernels.families import families
from kiln.jit_kernels.parameters import Arguments
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.spec import KernelSpec
from kiln.jit_kernels.triton_forms import triton_form


def run_reference(spec: KernelSpec, a: Arguments) -> None:
    """Write the reference's results into the arguments that the operator mutates."""
    for name, result in spec.reference(a).items():
        getattr(a, name).copy_(result)


def run_on_cpu(spec: KernelSpec, a: Arguments) -> None:
    """Run the reference, or the kernel's own source where ``KILN_CPU_KERNELS`` asks for it.

    A variant that the kernel does not come in runs as the reference.
    """
    _cpu_runner(spec.family)(spec, a)


def check_cpu_toggles() -> None:
    """Refuse toggles that a CPU cannot obey, before a model is loaded. Raises KernelError."""
    for family in families():
        _cpu_runner(family)


def run_on_cuda(spec: KernelSpec, a: Arguments) -> None:
    """Run the implementation that was chosen for the spec's family."""
    _cuda_runner(spec.family, spec.name)(spec, a)


@cache
def _cpu_runner(family: str) -> Callable[..., None]:
    toggle, mode = settings().kernel_choice(family), settings().cpu_kernels
    if toggle == "triton" or (toggle == "jit" and mode == "torch"):
        raise KernelError(
            f"KILN_{family.upper()}={toggle} needs a GPU and this model runs on the CPU: unset it, "
            "or set KILN_CPU_KERNELS=host to run Kiln's own kernels there"
        )
    if mode == "torch" or toggle == "torch":
        return run_reference
    host = importlib.import_module("kiln.jit_kernels.toolchains.host")

    def run(spec: KernelSpec, a: Arguments) -> None:
        if not spec.has_variant(spec.bind(a).variant):
            return run_reference(spec, a)
        host.run(spec, a, checked=mode == "host-check", env=settings())

    return run


@cache
def _cuda_runner(family: str, name: str) -> Callable[..., None]:
    implementation = choice(family).implementation
    if implementation == "torch":
        return run_reference
    if implementation == "triton":
        function = triton_form(family, name)
        return lambda spec, a: function(a)
    run: Callable[..., None] = importlib.import_module("kiln.jit_kernels.launch").launch
    return run
