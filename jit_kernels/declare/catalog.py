"""The specs that have been defined so far in this process, by name."""

from __future__ import annotations

from collections.abc import Sequence

from kiln.jit_kernels.declare.spec import KernelSpec, Variant

_SPECS: dict[str, KernelSpec] = {}


def add(specs: Sequence[KernelSpec]) -> None:
    """Enter some specs. Raises ValueError when a name is taken or a stand-in does not fit.

    A kernel that runs instead of another one takes the same parameters.
    """
    for spec in specs:
        if spec.name in _SPECS:
            raise ValueError(f"two kernels are named {spec.name!r}; the second is {spec.source}")
        own = _SPECS.get(spec.replaces, spec)
        if own.parameters.listed != spec.parameters.listed:
            raise ValueError(f"{spec.name} runs instead of {own.name}: its parameters must be too")
        _SPECS[spec.name] = spec


def best_form(spec: KernelSpec, variant: Variant, arch: str) -> KernelSpec:
    """Return what runs for an operator: its own kernel, or one that was made for the target.

    Nothing about a call decides but what is known when kernels are loaded, so that a request's bits
    do not depend on its batch.
    """
    for other in _SPECS.values():
        if other.replaces == spec.name and other.only_arch == arch and other.has_variant(variant):
            return other
    return spec
