"""Explain a cache hit or miss in words."""

from __future__ import annotations

from kiln.jit_kernels.compile.build import look_up, nearest_to
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.spec import KernelSpec, Variant


def explain(spec: KernelSpec, variant: Variant, arch: str, cache: KernelCache) -> str:
    """Return the location of a variant's cubin, or how the nearest entry differs."""
    built, unit = look_up(spec, variant, arch, cache)
    if built is None:
        near = nearest_to(spec, variant, arch, unit, cache)
        return f"not there; {near.sentence() if near else 'the cache is empty'}"
    if built.tier == "bundle" and cache.bundle is not None:
        return f"in bundle {cache.bundle.path}, key {built.key}"
    if built.tier == "disk":
        return f"in {cache.store.path(arch, built.key)}"
    return f"in this process, key {built.key}"
