"""The specs that have been defined so far in this process, by name."""

from __future__ import annotations

from collections.abc import Sequence

from kiln.jit_kernels.declare.spec import KernelSpec, Variant

_SPECS: dict[str, KernelSpec] = {}


def add(specs: Sequence[KernelSpec]) -> None:
    """Add some specs.

    Raises ValueError if a name is taken, or if a kernel that replaces another one has other
    parameters.
    """
    for spec in specs:
        if spec.name in _SPECS:
            raise ValueError(f"two kernels are named {spec.name!r}; the second is {spec.source}")
        own = _SPECS.get(spec.replaces, spec)
        if own.parameters.listed != spec.parameters.listed:
            raise ValueError(f"{spec.name} replaces {own.name}: it must have the same parameters")
        _SPECS[spec.name] = spec


def best_form(spec: KernelSpec, variant: Variant, arch: str) -> KernelSpec:
    """Return the spec of the kernel that runs an operator on a target.

    It is the operator's own spec, or one that replaces it on the target. The choice depends only on
    what is known when kernels are loaded, so that a request's bits do not depend on its batch.
    """
    for other in _SPECS.values():
        if other.replaces == spec.name and other.only_arch == arch and other.has_variant(variant):
            return other
    return spec
