"""Every kernel family and spec, found by walking jit_kernels/ops."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING

from kiln.jit_kernels.declare.families import family_modules

if TYPE_CHECKING:
    from kiln.jit_kernels.declare.spec import KernelSpec


@cache
def all_specs() -> dict[str, KernelSpec]:
    """Return name -> spec for every family. Importing a family registers its torch ops.

    Raises ValueError if two specs share a name, or if a family's folder and module differ in name.
    """
    found: dict[str, KernelSpec] = {}
    for family, module in family_modules().items():
        for spec in importlib.import_module(module).SPECS:
            if spec.family != family:
                raise ValueError(f"{spec.name}: {spec.source} belongs under {family}/")
            found[spec.name] = spec
    return found


def operators() -> list[KernelSpec]:
    """Return the specs that define an operator, not those that replace another one's kernel."""
    return [spec for spec in all_specs().values() if not spec.replaces]


def find_spec(name: str) -> KernelSpec:
    """Return the spec with a name. Raises KeyError, which lists the known names."""
    specs = all_specs()
    if name not in specs:
        raise KeyError(f"no kernel is named {name!r}; there are {', '.join(sorted(specs))}")
    return specs[name]
