"""The paths of entries under the root of the kernel cache: ``v2/<arch>/<2 hex>/<key>.kk``.

A path is built from a validated target and a validated key only.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kiln.cache.disk.trust import Trust, Untrusted

VERSION = "v2"
SUFFIX = ".kk"
BAD_SUFFIX = ".bad"
_ARCH = re.compile(r"sm_\d{2,3}[af]?|cpu")
_SHARD = re.compile(r"[0-9a-f]{2}")
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A file with the name of an entry, not verified. Its size is in bytes."""

    arch: str
    key: str
    path: Path
    size: int
    mtime: float


def check_name(arch: str, key: str) -> None:
    """Raise ValueError unless target and key are well-formed."""
    if not _ARCH.fullmatch(arch):
        raise ValueError(f"target {arch!r}: want cpu, or one such as sm_90a")
    if not _KEY.fullmatch(key):
        raise ValueError(f"key {key!r}: want 64 hex digits")


def folders(root: str, arch: str, key: str) -> tuple[str, str, str, str]:
    """Return the folders above an entry, from the root down. Raises ValueError."""
    check_name(arch, key)
    # Strings, not Path: building four Paths takes longer than reading the entry.
    above = f"{root}/{VERSION}/{arch}"
    return (root, f"{root}/{VERSION}", above, f"{above}/{key[:2]}")


def shards(root: Path, trust: Trust) -> Iterator[tuple[str, Path]]:
    """Yield the target and the path of every trusted folder of entries, in order."""
    if not _trusted(root, trust):
        return
    for arch, above in _subfolders(root / VERSION, _ARCH, trust):
        for _, shard in _subfolders(above, _SHARD, trust):
            yield arch, shard


def stored_entries(root: Path, trust: Trust) -> Iterator[StoredEntry]:
    """Yield every entry on disk, in order; files deleted meanwhile are skipped."""
    for arch, shard in shards(root, trust):
        for name, info in files_in(shard):
            key = name.removesuffix(SUFFIX)
            if key != name and _KEY.fullmatch(key) and key.startswith(shard.name):
                yield StoredEntry(arch, key, shard / name, info.st_size, info.st_mtime)


def files_in(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Return name and status of everything but folders in a folder, sorted by name."""
    found = []
    for name in _names(folder):
        try:
            info = os.lstat(folder / name)
        except OSError:
            continue
        if not stat.S_ISDIR(info.st_mode):
            found.append((name, info))
    return found


def _subfolders(folder: Path, pattern: re.Pattern[str], trust: Trust) -> Iterator[tuple[str, Path]]:
    if _trusted(folder, trust):
        for name in _names(folder):
            if pattern.fullmatch(name) and _trusted(folder / name, trust):
                yield name, folder / name


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _trusted(folder: Path, trust: Trust) -> bool:
    try:
        trust.check_folder(folder, os.lstat(folder))
    except (OSError, Untrusted):
        return False
    return True
