"""Every kernel family, spec and Triton form, found by walking jit_kernels/ops."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from kiln.jit_kernels.declare.errors import NoSuchKernel
from kiln.jit_kernels.declare.families import family_modules

if TYPE_CHECKING:
    from kiln.jit_kernels.declare.parameters import Arguments
    from kiln.jit_kernels.declare.spec import KernelSpec, Variant

_OPS = Path(__file__).parent / "ops"


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


def has_triton(family: str) -> bool:
    """Return whether Triton is installed and a family has Triton forms; imports neither."""
    return (
        importlib.util.find_spec("triton") is not None and (_OPS / family / "triton.py").is_file()
    )


def triton_form(
    family: str, name: str, variant: Variant = MappingProxyType({})
) -> Callable[[Arguments], None]:
    """Return the Triton form of an operator: it takes the same arguments and writes in place.

    A family whose Triton forms lack variants names those they have: ``VARIANTS`` in its triton.py
    is operator -> compile-time parameter -> values. Raises NoSuchKernel if Triton is not installed,
    or if the operator has no Triton form, or none of a variant. Of a variant, values that are left
    out are not asked for.
    """
    if not has_triton(family):
        raise NoSuchKernel(f"Triton is not installed, or {family} has no Triton forms")
    module = importlib.import_module(f"kiln.jit_kernels.ops.{family}.triton")
    form = getattr(module, name, None)
    if form is None:
        raise NoSuchKernel(f"{name} has no Triton form")
    for parameter, values in getattr(module, "VARIANTS", {}).get(name, {}).items():
        if parameter in variant and variant[parameter] not in values:
            raise NoSuchKernel(
                f"the Triton form of {name} has no variant for {parameter} {variant[parameter]} "
                f"(it has {parameter} {', '.join(values)})"
            )
    return form  # type: ignore[no-any-return]


def is_in_triton(spec: KernelSpec, variant: Variant) -> bool:
    """Return whether Triton is installed and a variant of an operator has a Triton form."""
    try:
        triton_form(spec.family, spec.name, variant)
    except NoSuchKernel:
        return False
    return True
