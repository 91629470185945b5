"""The tiers of the kernel cache: this process, a sealed bundle, the user's cache on disk.

| mode    | bundle | user's cache | on a miss                        |
|---------|--------|--------------|----------------------------------|
| rw      | read   | read         | build; publish to the user cache |
| ro      | read   | read         | build; keep in this process      |
| off     | no     | no           | build; keep in this process      |
| refresh | no     | no           | build; replace the user's entry  |
| sealed  | read   | read         | raise SealedMiss                 |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from kiln.cache.disk.bundle import Bundle, BundleError
from kiln.cache.disk.entry import Entry
from kiln.cache.disk.lock import builder_lock
from kiln.cache.disk.store import Store
from kiln.jit_kernels.compile.ingredients import stored_ingredients, value_of
from kiln.jit_kernels.declare.errors import BundleRefused, ToolchainMissing
from kiln.jit_kernels.toolchains import nvrtc

Tier = Literal["process", "bundle", "disk"]


class KernelCache:
    """The tiers, nearest first. Thread-safe."""

    def __init__(
        self, store: Store, *, bundle: Bundle | None = None, locks: Path | None = None
    ) -> None:
        """``store``: the user's cache; its mode applies to all tiers. ``locks``: see cache.lock."""
        self.store = store
        self.bundle = bundle
        self._locks = locks
        self._process: dict[tuple[str, str], bytes] = {}
        self._ours_alone: set[str] = set()
        self._stored: dict[str, tuple[str, ...]] = {}

    @property
    def sealed(self) -> bool:
        """Whether a miss is an error."""
        return self.store.mode == "sealed"

    @property
    def reads(self) -> bool:
        """Whether the bundle and the user's cache are read."""
        return self.store.mode in ("rw", "ro", "sealed")

    def find(self, arch: str, key: str) -> tuple[bytes, Tier] | None:
        """Return a verified cubin and its tier, or None. Raises BundleRefused."""
        kept = self._process.get((arch, key))
        if kept is not None:
            return kept, "process"
        if not self.reads:
            return None
        tier: Tier = "bundle"
        entry = self._in_bundle(arch, key)
        if entry is None:
            tier, entry = "disk", self.store.get(arch, key)
        if entry is None:
            return None
        self._process[arch, key] = entry.payload
        return entry.payload, tier

    def keep(self, arch: str, key: str, cubin: bytes, header: Mapping[str, Any]) -> bool:
        """Keep a cubin that was just built; return whether it is on disk too."""
        self._process[arch, key] = cubin
        return self.store.put(arch, key, cubin, header)

    def keep_in_process(self, arch: str, key: str, cubin: bytes) -> None:
        """Keep a cubin whose key names another compiler, so that it must not be published."""
        self._ours_alone.add(key)
        self._process[arch, key] = cubin

    def may_ship(self, key: str) -> bool:
        """Whether a kernel may be exported: not if ``keep_in_process`` kept it."""
        return key not in self._ours_alone

    def one_builder(self, key: str, seconds: float) -> AbstractContextManager[bool]:
        """Return a context that waits for another builder of a key; yields whether it got the lock.

        It does not wait if nothing is published to the user's cache.
        """
        if self._locks is None or self.store.root is None or self.store.mode != "rw":
            return nullcontext(True)
        return builder_lock(self._locks, key, seconds)

    def toolchains(self, arch: str) -> Iterator[str]:
        """Yield the identities of the compilers whose kernels are accepted, nearest first.

        First the bundle's, then the installed one. If the cache is sealed or none is installed,
        those that filled the user's cache replace the latter, because nothing will be compiled.
        """
        seen: dict[str, None] = dict.fromkeys(self._bundle_toolchains if self.reads else ())
        yield from seen
        installed = _installed() if not self.sealed else ""
        if installed:
            if installed not in seen:
                yield installed
        elif self.reads:
            yield from (one for one in self._stored_toolchains(arch) if one not in seen)

    def candidates(self, arch: str) -> Iterator[tuple[str, Entry]]:
        """Yield (location, entry) for all entries: the bundle's first, other targets last."""
        if not self.reads:
            return
        if self.bundle is not None:
            own = [(a, e) for a, _, e in self.bundle.entries()]
            yield from ((f"bundle {self.bundle.path}", e) for a, e in own if a == arch)
        stored = list(self.store.entries())
        for same in (True, False):
            for one in stored:
                if (one.arch == arch) is same and (e := self.store.get(one.arch, one.key)):
                    yield str(one.path), e
        if self.bundle is not None:
            yield from ((f"bundle {self.bundle.path}", e) for a, e in own if a != arch)

    @cached_property
    def _bundle_toolchains(self) -> tuple[str, ...]:
        if self.bundle is None:
            return ()
        return _toolchains_in(self.bundle.headers())

    def _stored_toolchains(self, arch: str) -> tuple[str, ...]:
        if arch not in self._stored:
            names = (one for one in self.store.entries() if one.arch == arch)
            entries = (self.store.get(one.arch, one.key) for one in names)
            self._stored[arch] = _toolchains_in(entry.header for entry in entries if entry)
        return self._stored[arch]

    def _in_bundle(self, arch: str, key: str) -> Entry | None:
        try:
            return None if self.bundle is None else self.bundle.get(arch, key)
        except BundleError as error:
            raise BundleRefused(str(error)) from None


def _toolchains_in(headers: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for header in headers:
        with suppress(ValueError):  # an entry of another program
            found[value_of(stored_ingredients(header), "toolchain")] = None
    return tuple(found)


@cache
def _installed() -> str:
    try:
        return nvrtc.identity()
    except ToolchainMissing:
        return ""
