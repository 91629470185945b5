"""Content-addressed entries on disk: a reader gets a complete, verified entry or none.

A bad entry (truncated, corrupt, untrusted owner, another key) is a miss, never an error. A disk
error logs one warning of its kind and never fails a request. The caller always uses the bytes that
it has just built; an entry is for the next process.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kiln.cache.disk.entry import Entry, EntryError, decode, encode
from kiln.cache.disk.layout import (
    BAD_SUFFIX,
    SUFFIX,
    StoredEntry,
    files_in,
    folders,
    shards,
    stored_entries,
)
from kiln.cache.disk.publish import publish, sweep
from kiln.cache.disk.trust import (
    Trust,
    Untrusted,
    close_quietly,
    make_folder,
    open_checked,
    read_all,
)
from kiln.cache.env import CacheMode as Mode

_TRANSIENT = (errno.ESTALE, errno.EIO)  # NFS lost a file handle or a request: retry
_TRANSIENT_WRITE = (*_TRANSIENT, errno.ENOENT)  # … or a folder that another node just created
_TOUCH = 86400.0  # seconds; a hit updates the mtime, which pruning uses, once a day
_MAX_SIZE = 256 * 2**20  # bytes; far above any entry that Kiln writes
_KEPT_BAD = 2  # damaged entries kept for inspection in each of the 256 folders of a target

log = logging.getLogger(__name__)


class Store:
    """Map from (target, key) to entry under one root folder; with ``root`` None, always empty.

    ``mode``: "rw"; "ro" and "sealed" never write; "off" neither reads nor writes; "refresh" misses
    every lookup and replaces existing entries.
    """

    def __init__(self, root: Path | None, *, mode: Mode = "rw", trust: Trust | None = None) -> None:
        self.root = root
        self.mode = mode
        self.trust = Trust() if trust is None else trust
        self._checked: set[str] = set()  # folders above the shards that are known to be trusted
        self._said: set[str] = set()
        self._lock = threading.Lock()

    @property
    def writes(self) -> bool:
        """Whether entries may be written, quarantined or touched."""
        return self.root is not None and self.mode in ("rw", "refresh")

    def path(self, arch: str, key: str) -> Path:
        """Return the path of an entry. Raises ValueError on a malformed target or key."""
        if self.root is None:
            raise ValueError("this store has no root folder, so it has no paths")
        return Path(folders(str(self.root), arch, key)[-1], f"{key}{SUFFIX}")

    def get(self, arch: str, key: str) -> Entry | None:
        """Return the verified entry of a key, or None on a miss of any kind. Never raises."""
        if self.root is None or self.mode in ("off", "refresh"):
            return None
        for last in (False, True):
            try:
                return self._read(arch, key)
            except FileNotFoundError:
                return None
            except (ValueError, Untrusted) as error:
                self._warn("untrusted", f"refused an entry: {error}")
                return None
            except OSError as error:
                if last or error.errno not in _TRANSIENT:
                    self._warn("disk", f"cannot read an entry: {error}")
                    return None
        return None

    def put(self, arch: str, key: str, payload: bytes, header: Mapping[str, Any]) -> bool:
        """Publish an entry; return whether it is on disk now, from this or another process.

        Never raises for disk errors or malformed names; ``header`` must be JSON.
        """
        if self.root is None and self.mode in ("rw", "refresh"):
            self._warn(
                "disk", "no usable home folder: kernels stay in memory; set KILN_KERNEL_CACHE_DIR"
            )
        if not self.writes:
            return False
        entry = Entry.of(header, payload)
        for last in (False, True):
            try:
                self._publish(arch, key, entry)
                return True
            except (ValueError, Untrusted) as error:
                self._warn("untrusted", f"not saving kernels to disk: {error}")
                return False
            except OSError as error:
                if last or error.errno not in _TRANSIENT_WRITE:
                    self._warn("disk", f"not saving kernels to disk: {error}")
                    return False
        return False

    def entries(self) -> Iterator[StoredEntry]:
        """Yield every entry on disk, unverified, in order of target and key."""
        if self.root is not None:
            yield from stored_entries(self.root, self.trust)

    def damaged(self) -> Iterator[tuple[StoredEntry, str]]:
        """Verify every entry; yield those that ``get`` would refuse, and why. Moves nothing."""
        for stored in self.entries():
            try:
                fd, info = open_checked(stored.path, self.trust)
                try:
                    decode(read_all(fd, info.st_size), stored.key, stored.arch)
                finally:
                    close_quietly(fd)
            except FileNotFoundError:
                continue
            except (OSError, Untrusted, EntryError) as error:
                yield stored, str(error)

    def quarantined(self) -> Iterator[Path]:
        """Yield the quarantined entries."""
        if self.root is not None:
            for _, shard in shards(self.root, self.trust):
                yield from (
                    shard / name for name, _ in files_in(shard) if name.endswith(BAD_SUFFIX)
                )

    def sweep(self) -> int:
        """Remove all leftovers of killed writers; return how many files."""
        if self.root is None or not self.writes:
            return 0
        return sum(sweep(shard) for _, shard in shards(self.root, self.trust))

    def _read(self, arch: str, key: str) -> Entry:
        *above, shard = folders(str(self.root), arch, key)
        for folder in above:
            if folder not in self._checked:
                self.trust.check_folder(folder, os.lstat(folder))
                self._checked.add(folder)
        self.trust.check_folder(shard, os.lstat(shard))
        path = f"{shard}/{key}{SUFFIX}"
        try:
            fd, info = open_checked(path, self.trust)
        except Untrusted:
            self._move_aside(path, None)
            raise
        try:
            if info.st_size > _MAX_SIZE:
                raise EntryError(f"{info.st_size} bytes: too large for a kernel")
            entry = decode(read_all(fd, info.st_size), key, arch)
        except EntryError as error:
            self._warn("damaged", f"{path} will be built again: {error}")
            self._move_aside(path, info)
            raise FileNotFoundError(path) from None
        finally:
            close_quietly(fd)
        if self.writes and abs(time.time() - info.st_mtime) > _TOUCH:
            with contextlib.suppress(OSError):
                os.utime(path)
        return entry

    def _publish(self, arch: str, key: str, entry: Entry) -> None:
        above = folders(str(self.root), arch, key)
        data = encode(key, arch, entry)
        for folder in above:
            make_folder(Path(folder), self.trust)
        shard = Path(above[-1])
        publish(shard / f"{key}{SUFFIX}", data, replace=self.mode == "refresh")
        sweep(shard)

    def _move_aside(self, path: str, read: os.stat_result | None) -> None:
        """Quarantine a bad entry, so that the next build can publish in its place.

        ``read`` is the status of the bad file, or None if it could not be opened. A file that
        replaced it meanwhile is kept. In a shared cache other users may trust more owners, so an
        untrusted file stays for them.
        """
        if not self.writes or (read is None and self.trust.shared):
            return
        with contextlib.suppress(OSError):
            now = os.lstat(path)
            if read is not None and (now.st_dev, now.st_ino) != (read.st_dev, read.st_ino):
                return
            kept = sum(name.endswith(BAD_SUFFIX) for name in os.listdir(os.path.dirname(path)))
            if kept < _KEPT_BAD:
                os.rename(path, path.removesuffix(SUFFIX) + BAD_SUFFIX)
            else:
                os.unlink(path)

    def _warn(self, kind: str, message: str) -> None:
        """Log a warning once per kind; repetitions are logged at debug level."""
        with self._lock:
            first = kind not in self._said
            self._said.add(kind)
        log.log(logging.WARNING if first else logging.DEBUG, "kernel cache: %s", message)
