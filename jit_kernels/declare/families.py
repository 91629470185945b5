"""The names of the kernel families, found without importing them or torch."""

from __future__ import annotations

import pkgutil
from pathlib import Path


def families() -> list[str]:
    """Return the names of the kernel families: the modules and packages in jit_kernels/ops."""
    return sorted(family_modules())


def family_modules() -> dict[str, str]:
    """Return family -> the module that declares its SPECS, ``ops.<family>[.spec]``.

    A package without a spec.py is shared code, not a family.
    """
    folder = Path(__file__).parents[1] / "ops"
    return {
        info.name: f"kiln.jit_kernels.ops.{info.name}" + (".spec" if info.ispkg else "")
        for info in pkgutil.iter_modules([str(folder)])
        if not info.ispkg or (folder / info.name / "spec.py").exists()
    }
