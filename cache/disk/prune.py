"""Keep the kernel cache below a size and an age while other processes read it.

Called by ``kiln kernels prune`` and at the end of a warm-up, never while serving a request.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from kiln.cache.disk.layout import BAD_SUFFIX, StoredEntry, files_in, shards, stored_entries
from kiln.cache.disk.publish import sweep
from kiln.cache.disk.root import cache_roots, trust_of
from kiln.cache.disk.trust import Trust
from kiln.cache.env import Env

_DAY = 86400.0
_KEEP_BAD = 7 * _DAY  # seconds that a damaged entry is kept for inspection


@dataclass(frozen=True, slots=True)
class Pruned:
    """Removed and kept entries; sizes in bytes. ``leftovers``: temporary and damaged files."""

    removed: tuple[StoredEntry, ...]
    removed_bytes: int
    kept: int
    kept_bytes: int
    leftovers: int


def prune(
    root: Path | None,
    *,
    max_bytes: int,
    max_days: float,
    dry_run: bool = False,
    trust: Trust | None = None,
) -> Pruned:
    """Remove entries unused for ``max_days``, then the least recently used above ``max_bytes``.

    A process that has an entry open can still read it; a later reader misses and builds it again.
    Never raises: an entry that cannot be removed counts as kept. With ``dry_run`` the result is the
    same, but nothing is removed, and leftovers are not counted.
    """
    if root is None:
        return Pruned((), 0, 0, 0, 0)
    trust = Trust() if trust is None else trust
    now = time.time()
    # A time in the future means that the clock was set back: the entry counts as just used.
    newest_first = sorted(stored_entries(root, trust), key=lambda entry: -entry.mtime)
    removed: list[StoredEntry] = []
    kept = kept_bytes = 0
    for entry in newest_first:
        fits = kept_bytes + entry.size <= max_bytes and now - entry.mtime <= max_days * _DAY
        if not fits and (dry_run or _remove(entry)):
            removed.append(entry)
        else:
            kept, kept_bytes = kept + 1, kept_bytes + entry.size
    leftovers = 0 if dry_run else _clean(root, trust, now)
    return Pruned(tuple(removed), sum(e.size for e in removed), kept, kept_bytes, leftovers)


def prune_all(env: Env, max_mb: float, max_days: float, *, dry_run: bool = False) -> list[Pruned]:
    """Prune the folders of kernels and of pieces, each to ``max_mb`` megabytes."""
    size, trust = int(max_mb * 10**6), trust_of(env)
    return [
        prune(root, max_bytes=size, max_days=max_days, dry_run=dry_run, trust=trust)
        for root in cache_roots(env)
    ]


def _remove(entry: StoredEntry) -> bool:
    """Remove an entry unless it was used since it was listed; return whether it is gone."""
    try:
        if os.lstat(entry.path).st_mtime != entry.mtime:
            return False
        os.unlink(entry.path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _clean(root: Path, trust: Trust, now: float) -> int:
    count = 0
    for _, shard in shards(root, trust):
        count += sweep(shard)
        for name, info in files_in(shard):
            if name.endswith(BAD_SUFFIX) and abs(now - info.st_mtime) > _KEEP_BAD:
                with contextlib.suppress(OSError):
                    os.unlink(shard / name)
                    count += 1
    return count
