"""Every kernel family and spec, found by walking jit_kernels/ops."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from kiln.jit_kernels import ops

if TYPE_CHECKING:
    from kiln.jit_kernels.spec import KernelSpec


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


def find_spec(name: str) -> KernelSpec:
    """Return the spec of a name. Raises KeyError that lists the known names."""
    specs = all_specs()
    if name not in specs:
        raise KeyError(f"no kernel is named {name!r}; there are {', '.join(sorted(specs))}")
    return specs[name]
