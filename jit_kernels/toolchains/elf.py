"""Read a shared library's GNU build id, without loading the library."""

from __future__ import annotations

import struct
from pathlib import Path

_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SEGMENT = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_NOTE = struct.Struct("<III")


def build_id(path: Path) -> str:
    """Return the build id of a 64-bit little-endian ELF file in hex, or "" if it has none.

    Raises OSError when the file cannot be read. Source: the System V ABI, note section.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(b"\x7fELF\x02\x01"):
            return ""
        fields = _HEADER.unpack(header)
        table, entry_size, count = fields[5], fields[9], fields[10]
        for index in range(count):
            file.seek(table + index * entry_size)
            kind, _, offset, _, _, size, _, _ = _SEGMENT.unpack(file.read(_SEGMENT.size))
            if kind == _PT_NOTE:
                file.seek(offset)
                found = _build_id_note(file.read(size))
                if found:
                    return found
    return ""


def _build_id_note(data: bytes) -> str:
    at = 0
    while at + _NOTE.size <= len(data):
        name_size, value_size, kind = _NOTE.unpack_from(data, at)
        name_at = at + _NOTE.size
        value_at = name_at + -(-name_size // 4) * 4
        if kind == _NT_GNU_BUILD_ID and data[name_at : name_at + name_size] == b"GNU\0":
            return data[value_at : value_at + value_size].hex()
        at = value_at + -(-value_size // 4) * 4
    return ""
