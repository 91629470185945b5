"""The toggles, read once per process."""

from __future__ import annotations

from functools import cache

from kiln.cache.env import Env, read
from kiln.jit_kernels.declare.families import families


@cache
def settings() -> Env:
    """Return the environment as typed values. Raises EnvError on a bad ``KILN_`` variable."""
    return read(families())
