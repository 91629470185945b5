"""What kernels with a norm multiply by, and when they round: the same for all of them."""

from __future__ import annotations

from kiln.jit_kernels.declare.parameters import Arguments, derived, operator_only, values

FACTORS = [
    *values("float", "eps", "weight_offset"),
    *operator_only("bool", "round_once"),
    *derived("int32", "once"),
]
"""Parameters of an operator and of its kernel."""


def rounds_once(a: Arguments) -> bool:
    """Return whether a call rounds only the product with the weight: always with an offset."""
    return bool(a.round_once or a.weight_offset)


def derived_of(a: Arguments) -> dict[str, int]:
    """Return what the kernel gets instead of ``round_once``."""
    return {"once": int(rounds_once(a))}
