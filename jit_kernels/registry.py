"""Every kernel family and spec, found by walking jit_kernels/ops."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from kiln.jit_kernels import ops

if TYPE_CHECKING:
    from kiln.jit_kernels.spec import KernelSpec, Variant


def families() -> list[str]:
    """Return the names of the kernel families, without importing any (nor torch)."""
    return sorted(info.name for info in pkgutil.iter_modules(ops.__path__))


@cache
def all_specs() -> dict[str, KernelSpec]:
    """Return name -> spec for every family. Importing a family registers its torch ops.

    Raises ValueError when two specs share a name or a family's folder is not its module's name.
    """
    found: dict[str, KernelSpec] = {}
    for family in families():
        for spec in importlib.import_module(f"{ops.__name__}.{family}").SPECS:
            if spec.name in found:
                raise ValueError(f"two kernels are named {spec.name!r}; the second is in {family}")
            if spec.family != family:
                raise ValueError(f"{spec.name}: {spec.source} belongs under {family}/")
            found[spec.name] = spec
    return found


def operators() -> list[KernelSpec]:
    """Return the specs that have an operator of their own, not those that stand in for one."""
    return [spec for spec in all_specs().values() if not spec.instead_of]


def best_form(spec: KernelSpec, variant: Variant, arch: str) -> KernelSpec:
    """Return what runs for an operator: its own kernel, or one that was made for the target.

    Nothing about a call decides but what is known when kernels are loaded, so that a request's bits
    do not depend on its batch.
    """
    for other in all_specs().values():
        if other.instead_of == spec.name and other.only_arch == arch and other.has_variant(variant):
            return other
    return spec


def find_spec(name: str) -> KernelSpec:
    """Return the spec of a name. Raises KeyError that lists the known names."""
    specs = all_specs()
    if name not in specs:
        raise KeyError(f"no kernel is named {name!r}; there are {', '.join(sorted(specs))}")
    return specs[name]
