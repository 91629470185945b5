"""Cache entries of many kernels in one sealed file, to ship with a program or a container image.

    magic · u32 manifest length · manifest JSON, spaces to a multiple of 64 · entries · SHA-256

The manifest lists target, key, offset and SHA-256 of every entry. The final digest covers all bytes
before it. The whole file is read into memory before the check, so it cannot change afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kiln.cache.disk.entry import (
    ALIGNMENT,
    DIGEST_SIZE,
    Entry,
    EntryError,
    decode,
    encode,
    header_of,
)
from kiln.cache.disk.layout import check_name
from kiln.cache.disk.publish import publish
from kiln.cache.disk.trust import Trust, Untrusted, close_quietly, open_checked, read_all

_MAGIC = b"KILNKB2\n"  # change it together with the entries' magic
_LENGTH = struct.Struct("<I")
_START = len(_MAGIC) + _LENGTH.size
_MAX_SIZE = 2**30  # bytes; 7 targets of 60 kernels are 6 MB


class BundleError(ValueError):
    """A bundle cannot be read or is not trusted; the message says which bundle and why."""


@dataclass(frozen=True, slots=True)
class _Place:
    start: int
    end: int
    sha256: str


class Bundle:
    """An open bundle: a map from (target, key) to entry. ``sha256`` covers the whole file."""

    def __init__(self, path: Path, data: bytes) -> None:
        """Parse the bytes of a bundle; callers use ``open`` instead. Raises BundleError."""
        self.path = path
        self._data = data
        self.sha256, self._places = _read_manifest(path, data)

    @classmethod
    def open(cls, path: Path, sha256: str | None = None, trust: Trust | None = None) -> Bundle:
        """Read and check a bundle, and compare its SHA-256 with ``sha256`` if given.

        Raises BundleError if it is absent, untrusted, damaged, or has another SHA-256.
        """
        try:
            fd, info = open_checked(path, Trust() if trust is None else trust)
            try:
                if info.st_size > _MAX_SIZE:
                    raise BundleError(f"bundle {path} has {info.st_size} bytes: not a Kiln bundle")
                data = read_all(fd, info.st_size)
            finally:
                close_quietly(fd)
        except OSError as error:
            raise BundleError(f"bundle {path} cannot be read: {error.strerror}") from None
        except Untrusted as error:
            raise BundleError(f"bundle refused: {error}") from None
        bundle = cls(path, data)
        if sha256 is not None and bundle.sha256 != sha256.lower():
            raise BundleError(f"bundle {path} has SHA-256 {bundle.sha256}, want {sha256}")
        return bundle

    def get(self, arch: str, key: str) -> Entry | None:
        """Return the entry of a key, verified again, or None. Raises BundleError."""
        place = self._places.get((arch, key))
        if place is None:
            return None
        try:
            return decode(self._data[place.start : place.end], key, arch)
        except EntryError as error:
            raise BundleError(f"bundle {self.path}: {key}: {error}") from None

    def headers(self) -> Iterator[Mapping[str, Any]]:
        """Yield the header of every entry; payloads are not verified."""
        for place in self._places.values():
            yield header_of(self._data[place.start : place.end])

    def entries(self) -> Iterator[tuple[str, str, Entry]]:
        """Yield (target, key, entry) of every kernel, in order. Raises BundleError."""
        for (arch, key), place in self._places.items():
            data = memoryview(self._data)[place.start : place.end]
            if hashlib.sha256(data).hexdigest() != place.sha256:
                raise BundleError(f"bundle {self.path}: {key} differs from the manifest")
            entry = self.get(arch, key)
            assert entry is not None
            yield arch, key, entry

    def __len__(self) -> int:
        return len(self._places)


def write_bundle(path: Path, entries: Iterable[tuple[str, str, Entry]]) -> str:
    """Write a bundle; return the SHA-256 of the file, for ``KILN_KERNEL_BUNDLE_SHA256``.

    The same entries in any order give the same bytes. Raises OSError, and ValueError if a target or
    key is malformed or a pair is repeated.
    """
    blobs: dict[tuple[str, str], bytes] = {}
    for arch, key, entry in entries:
        check_name(arch, key)
        if (arch, key) in blobs:
            raise ValueError(f"{key} for {arch} twice in one bundle")
        blobs[arch, key] = encode(key, arch, entry)
    listed, parts, offset = [], [], 0
    for (arch, key), blob in sorted(blobs.items()):
        digest = hashlib.sha256(blob).hexdigest()
        listed.append(
            {"arch": arch, "key": key, "offset": offset, "size": len(blob), "sha256": digest}
        )
        parts.append(blob + b"\0" * (-len(blob) % ALIGNMENT))
        offset += len(parts[-1])
    manifest = json.dumps({"entries": listed}, sort_keys=True, separators=(",", ":")).encode()
    manifest += b" " * (-(_START + len(manifest)) % ALIGNMENT)
    body = b"".join((_MAGIC, _LENGTH.pack(len(manifest)), manifest, *parts))
    data = body + hashlib.sha256(body).digest()
    publish(Path(os.path.abspath(path)), data, replace=True)
    return hashlib.sha256(data).hexdigest()


def _read_manifest(path: Path, data: bytes) -> tuple[str, dict[tuple[str, str], _Place]]:
    """Check a bundle; return the SHA-256 of the file, and the offset and size of each entry."""
    if not data.startswith(_MAGIC) or len(data) < _START + DIGEST_SIZE:
        raise BundleError(f"{path} is not a kernel bundle, has another version, or is truncated")
    end = len(data) - DIGEST_SIZE
    whole = hashlib.sha256(memoryview(data)[:end])
    if whole.digest() != data[end:]:
        raise BundleError(f"bundle {path} is truncated or damaged: its SHA-256 does not match")
    start = _START + int(_LENGTH.unpack_from(data, len(_MAGIC))[0])
    places: dict[tuple[str, str], _Place] = {}
    try:
        for item in json.loads(data[_START:start])["entries"]:
            name, place = _place(item, start)
            if place.end > end or name in places:
                raise ValueError(f"{name} is outside the file, or listed twice")
            places[name] = place
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleError(f"bundle {path}: its manifest is invalid: {error}") from None
    whole.update(data[end:])
    return whole.hexdigest(), places


def _place(item: dict[str, Any], start: int) -> tuple[tuple[str, str], _Place]:
    arch, key, offset, size = item["arch"], item["key"], item["offset"], item["size"]
    check_name(arch, key)
    if not (isinstance(offset, int) and isinstance(size, int) and offset >= 0 < size):
        raise ValueError(f"offset {offset!r} and size {size!r} of {key}")
    return (arch, key), _Place(start + offset, start + offset + size, str(item["sha256"]))
