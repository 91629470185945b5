"""Verify the entries of the kernel cache, and rebuild them to compare."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kiln.cache.disk.bundle import BundleError
from kiln.cache.disk.entry import Entry
from kiln.jit_kernels.compile.ingredients import (
    ingredients_of,
    key_of,
    stored_ingredients,
    value_of,
)
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.warmup import Job
from kiln.jit_kernels.declare.errors import BundleRefused
from kiln.jit_kernels.toolchains import nvrtc
from kiln.jit_kernels.toolchains.cubin import resources_of
from kiln.jit_kernels.toolchains.template import Unit, render


@dataclass(frozen=True, slots=True)
class Flaw:
    """A bad entry and the reason."""

    where: str
    reason: str


def audit(cache: KernelCache) -> tuple[int, list[Flaw]]:
    """Verify every entry of the bundle and of the user's cache; return their number and the flaws.

    Besides the digest: an entry's ingredients must hash to its key, and its payload must be a
    cubin. Raises BundleRefused.
    """
    damaged = list(cache.store.damaged())
    flaws = [Flaw(str(stored.path), reason) for stored, reason in damaged]
    checked = len(damaged)
    bad = {stored.path for stored, _ in damaged}
    for where, arch, key, entry in _entries(cache, bad):
        checked += 1
        reason = flaw_of(arch, key, entry)
        if reason:
            flaws.append(Flaw(where, reason))
    return checked, flaws


def flaw_of(arch: str, key: str, entry: Entry) -> str:
    """Return the flaw of an entry whose digest is right, "" if there is none."""
    try:
        ingredients = stored_ingredients(entry.header)
        resources_of(entry.payload)
    except ValueError as error:
        return str(error)
    if key_of(ingredients) != key:
        return "its ingredients do not hash to its key"
    if value_of(ingredients, "arch") != arch:
        return f"it was built for {value_of(ingredients, 'arch')}, not for {arch}"
    return ""


def rebuild(
    jobs: Sequence[Job], cache: KernelCache, num_threads: int = 0
) -> tuple[int, list[Flaw]]:
    """Compile every job in the cache again; return their number, and those whose bytes differ.

    Only entries built by this machine's NVRTC can be compared. Raises ToolchainMissing and
    CompileError.
    """
    held = [found for job in jobs if (found := _held(job, cache)) is not None]

    def same(held: _Held) -> bool:
        return nvrtc.compile_cubin(held.job.name, held.unit, held.job.arch) == held.cubin

    with ThreadPoolExecutor(num_threads or min(os.cpu_count() or 1, 8)) as pool:
        results = list(zip(held, pool.map(same, held), strict=True))
    reason = "a rebuild gives other bytes than the entry"
    return len(held), [
        Flaw(one.job.name, f"{reason} {one.key}") for one, equal in results if not equal
    ]


@dataclass(frozen=True, slots=True)
class _Held:
    """A job whose cubin, built by this machine's NVRTC, is in the cache."""

    job: Job
    unit: Unit
    key: str
    cubin: bytes


def _held(job: Job, cache: KernelCache) -> _Held | None:
    unit = render(job.spec, job.variant)
    key = key_of(ingredients_of(job.spec, unit, job.arch, nvrtc.identity()))
    found = cache.find(job.arch, key)
    return None if found is None else _Held(job, unit, key, found[0])


def _entries(cache: KernelCache, bad: set[Path]) -> Iterator[tuple[str, str, str, Entry]]:
    if cache.bundle is not None:
        try:
            for arch, key, entry in cache.bundle.entries():
                yield f"bundle {cache.bundle.path}: {key}", arch, key, entry
        except BundleError as error:
            raise BundleRefused(str(error)) from None
    for stored in cache.store.entries():
        if stored.path not in bad:
            found = cache.store.get(stored.arch, stored.key)
            if found is not None:
                yield str(stored.path), stored.arch, stored.key, found
