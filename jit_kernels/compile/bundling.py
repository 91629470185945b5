"""Export and import sealed bundles, and find single entries of the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kiln.cache.disk.bundle import Bundle, BundleError, write_bundle
from kiln.cache.disk.entry import Entry
from kiln.cache.disk.root import trust_of
from kiln.cache.env import Env
from kiln.jit_kernels.compile.audit import flaw_of
from kiln.jit_kernels.compile.build import header_of, look_up
from kiln.jit_kernels.compile.ingredients import ingredients_of, key_of
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.warmup import Job
from kiln.jit_kernels.declare.errors import BundleRefused, KernelError

_SHORTEST_KEY = 6  # hex digits


@dataclass(frozen=True, slots=True)
class Exported:
    """The number of entries in a new bundle, its SHA-256, and the jobs that the cache lacks."""

    written: int
    sha256: str
    missing: tuple[str, ...]


def export_bundle(path: Path, jobs: Iterable[Job], cache: KernelCache) -> Exported:
    """Write the cached builds of some jobs to a bundle; if there are none, write no file.

    The same kernels give the same bytes on any machine. Raises KernelError.
    """
    entries: list[tuple[str, str, Entry]] = []
    missing = []
    for job in jobs:
        found = _entry_of(job, cache)
        if found is None:
            missing.append(job.name)
        else:
            entries.append((job.arch, *found))
    try:
        sha256 = write_bundle(path, entries) if entries else ""
    except OSError as error:
        raise KernelError(f"{path} cannot be written: {error.strerror or error}") from None
    return Exported(len(entries), sha256, tuple(missing))


def _entry_of(job: Job, cache: KernelCache) -> tuple[str, Entry] | None:
    """Return key and entry of a job. The header is computed again; it is deterministic."""
    built, unit = look_up(job.spec, job.variant, job.arch, cache)
    if built is None or not cache.may_ship(built.key):
        return None
    for toolchain in cache.toolchains(job.arch):
        ingredients = ingredients_of(job.spec, unit, job.arch, toolchain)
        if key_of(ingredients) == built.key:
            header = header_of(job.spec, job.variant, ingredients, built.cubin)
            return built.key, Entry.of(header, built.cubin)
    return None


def import_bundle(path: Path, sha256: str | None, cache: KernelCache, env: Env) -> tuple[int, int]:
    """Copy every entry of a bundle into the user's cache; return the counts (kept, not kept).

    Raises BundleRefused, before anything is written, if an entry is bad.
    """
    try:
        bundle = Bundle.open(path, sha256, trust_of(env))
        entries = list(bundle.entries())
    except BundleError as error:
        raise BundleRefused(str(error)) from None
    for arch, key, entry in entries:
        flaw = flaw_of(arch, key, entry)
        if flaw:
            raise BundleRefused(f"bundle {path}: {key}: {flaw}")
    kept = sum(cache.store.put(arch, key, e.payload, e.header) for arch, key, e in entries)
    return kept, len(entries) - kept


def find_entry(beginning: str, cache: KernelCache) -> tuple[str, Entry]:
    """Return key and entry of the only key with this prefix. Raises KernelError."""
    if len(beginning) < _SHORTEST_KEY:
        raise KernelError(f"key {beginning!r}: give at least {_SHORTEST_KEY} hex digits")
    found = {key: arch for arch, key in _keys(cache) if key.startswith(beginning.lower())}
    if len(found) != 1:
        raise KernelError(f"{len(found)} entries have a key that begins with {beginning!r}")
    ((key, arch),) = found.items()
    entry = cache.bundle.get(arch, key) if cache.bundle is not None else None
    entry = entry or cache.store.get(arch, key)
    if entry is None:
        raise KernelError(f"entry {key} for {arch} cannot be read: run kiln kernels verify")
    return key, entry


def _keys(cache: KernelCache) -> Iterator[tuple[str, str]]:
    if cache.bundle is not None:
        yield from ((arch, key) for arch, key, _ in cache.bundle.entries())
    yield from ((one.arch, one.key) for one in cache.store.entries())
