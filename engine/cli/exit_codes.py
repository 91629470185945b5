"""The exit codes of ``kiln``."""

from __future__ import annotations

from kiln.engine.errors import SealedCacheError
from kiln.jit_kernels.declare.errors import BundleRefused, CompileError, SealedMiss

OK = 0
FAILED = 1
WRONG_USE = 2
SEALED_MISS = 3  # the kernel cache is sealed, and a kernel is not in it
CORRUPT = 4  # the kernel cache or a bundle is damaged
COMPILE_FAILED = 5
INTERRUPTED = 130  # the shell's convention for SIGINT


def code_of(error: Exception) -> int:
    """Return the exit code for an error."""
    if isinstance(error, SealedMiss | SealedCacheError):
        return SEALED_MISS
    if isinstance(error, BundleRefused):
        return CORRUPT
    return COMPILE_FAILED if isinstance(error, CompileError) else FAILED
