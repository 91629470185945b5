"""Build the cubin of a variant through the kernel cache."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kiln.jit_kernels.compile.ingredients import Ingredients, ingredients_of, key_of
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.ready import ready_guard
from kiln.jit_kernels.compile.why import Nearest, nearest
from kiln.jit_kernels.declare.errors import CompileError, SealedMiss
from kiln.jit_kernels.declare.spec import KernelSpec, Variant, label
from kiln.jit_kernels.toolchains import nvrtc
from kiln.jit_kernels.toolchains.cubin import CubinError, resources_of
from kiln.jit_kernels.toolchains.template import Unit, render

Tier = Literal["process", "bundle", "disk", "built"]
_PATIENCE = 30.0  # seconds to wait while another process builds the same kernel


@dataclass(frozen=True, slots=True)
class Built:
    """A cubin, its key, the cache tier that had it, and the seconds that this took."""

    cubin: bytes
    key: str
    tier: Tier
    seconds: float

    @property
    def hit(self) -> bool:
        """Whether this was a cache hit."""
        return self.tier != "built"


def build(spec: KernelSpec, variant: Variant, arch: str, cache: KernelCache) -> Built:
    """Return the cubin of a variant for ``arch``: from the cache, else from NVRTC.

    A cache hit loads neither NVRTC nor its bindings. A cubin that was just compiled is never read
    back from disk. Raises CompileError, ToolchainMissing, SealedMiss, BundleRefused and LateKernel.
    """
    built = _obtain(spec, variant, arch, cache, _PATIENCE)
    assert built is not None, "None is only for callers that do not wait"
    return built


def build_unless_busy(
    spec: KernelSpec, variant: Variant, arch: str, cache: KernelCache
) -> Built | None:
    """Like ``build``, but return None at once if another process builds the same kernel."""
    return _obtain(spec, variant, arch, cache, 0.0)


def look_up(
    spec: KernelSpec, variant: Variant, arch: str, cache: KernelCache
) -> tuple[Built | None, Unit]:
    """Return the cached build of a variant, if any, and its translation unit."""
    start = time.perf_counter()
    unit = render(spec, variant)
    for toolchain in cache.toolchains(arch):
        key = key_of(ingredients_of(spec, unit, arch, toolchain))
        found = cache.find(arch, key)
        if found is not None:
            return Built(found[0], key, found[1], time.perf_counter() - start), unit
    return None, unit


def _obtain(
    spec: KernelSpec, variant: Variant, arch: str, cache: KernelCache, patience: float
) -> Built | None:
    start = time.perf_counter()
    found, unit = look_up(spec, variant, arch, cache)
    if found is not None:
        return found
    name = label(spec, variant)
    if cache.sealed:
        raise SealedMiss(_sealed_miss(spec, variant, arch, unit, cache))
    ingredients = ingredients_of(spec, unit, arch, nvrtc.identity())
    key = key_of(ingredients)
    with cache.one_builder(key, patience) as alone:
        again = cache.find(arch, key)  # another process may have built it in the meantime
        if again is not None:
            return Built(again[0], key, again[1], time.perf_counter() - start)
        if not alone and not patience:
            return None
        ready_guard().passes(f"{name} for {arch}", "compiled")
        cubin = nvrtc.compile_cubin(name, unit, arch)
        header = header_of(spec, variant, ingredients, cubin)
        if nvrtc.loaded_identity() == nvrtc.identity():
            cache.keep(arch, key, cubin, header)
        else:
            cache.keep_in_process(arch, key, cubin)
    return Built(cubin, key, "built", time.perf_counter() - start)


def header_of(
    spec: KernelSpec, variant: Variant, ingredients: Ingredients, cubin: bytes
) -> dict[str, Any]:
    """Return the header of an entry. It is deterministic.

    Raises CompileError if the cubin lacks the spec's kernel.
    """
    try:
        resources = resources_of(cubin)
    except CubinError as error:
        raise CompileError(f"{label(spec, variant)}: NVRTC returned no cubin: {error}") from None
    if spec.entry not in resources:
        raise CompileError(
            f'{label(spec, variant)}: {spec.source} has no extern "C" kernel {spec.entry!r}; '
            f"it has {', '.join(resources) or 'none'}"
        )
    return {
        "kernel": spec.name,
        "variant": dict(variant),
        "ingredients": [list(pair) for pair in ingredients],
        "resources": {entry: asdict(one) for entry, one in resources.items()},
    }


def nearest_to(
    spec: KernelSpec, variant: Variant, arch: str, unit: Unit, cache: KernelCache
) -> Nearest | None:
    """Return the entry nearest to a missing build, None if the cache is empty."""
    toolchain = next(cache.toolchains(arch), "")
    wanted = ingredients_of(spec, unit, arch, toolchain)
    return nearest(spec.name, dict(variant), wanted, cache.candidates(arch))


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


def _sealed_miss(
    spec: KernelSpec, variant: Variant, arch: str, unit: Unit, cache: KernelCache
) -> str:
    found = nearest_to(spec, variant, arch, unit, cache)
    where = cache.bundle.path if cache.bundle is not None else cache.store.root
    return (
        f"{label(spec, variant)} for {arch} is not in the sealed kernel cache ({where}): "
        f"{found.sentence() if found else 'the cache is empty'}"
    )
