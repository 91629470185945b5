"""Read a kernel's resources from its cubin: registers, shared memory, stack, spills.

The compiler could print the same numbers, but the option for that would change the cubin.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
_EM_CUDA = 190
_SHT_NOBITS = 8
_STT_FUNC = 2
_STB_GLOBAL = 1
# Attributes of .nv.info, with the names that cuobjdump prints.
_WITH_SIZE = 4  # the value is bytes, preceded by their number
_REGCOUNT = 0x2F
_MIN_STACK_SIZE = 0x12
_ANNOTATIONS = 0x55  # pairs of (kind, offset of an instruction)
_SPILL = 1
# From sm_90 on the driver reserves this much shared memory per block; the section size includes it.
_RESERVED_SHARED = 1024


class CubinError(ValueError):
    """Bytes are not a cubin, or a cubin of an unknown format."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one kernel. Units: registers per thread, bytes, instructions."""

    registers: int
    shared_bytes: int  # static shared memory per block
    stack_bytes: int  # local memory per thread
    spills: int  # instructions that spill or reload a register


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    data: bytes
    size: int


def resources_of(cubin: bytes) -> dict[str, Resources]:
    """Return entry name -> resources, for every kernel in a cubin. Raises CubinError.

    Source: the ELF sections that nvdisasm and cuobjdump show; tests compare with ptxas.
    """
    try:
        return _resources_of(cubin)
    except CubinError:
        raise
    except (struct.error, LookupError, ValueError) as error:
        raise CubinError(f"not a complete cubin: {error}") from None


def code_of(cubin: bytes) -> dict[str, bytes]:
    """Return entry name -> machine code, for every kernel in a cubin. Raises CubinError."""
    names = resources_of(cubin)  # also checks that the cubin is complete
    sections = _sections(cubin, _HEADER.unpack_from(cubin))
    return {name: sections[f".text.{name}"].data for name in names}


def _resources_of(cubin: bytes) -> dict[str, Resources]:
    header = _HEADER.unpack_from(cubin)
    if not cubin.startswith(b"\x7fELF\x02\x01") or header[2] != _EM_CUDA:
        raise CubinError("not an ELF file for a CUDA device")
    segments_end = header[5] + header[9] * header[10]
    if segments_end > len(cubin):
        raise CubinError(f"truncated to {len(cubin)} bytes")
    sections = _sections(cubin, header)
    symbols = _symbols(sections)
    registers = _by_symbol(sections, _REGCOUNT, symbols)
    stack = _by_symbol(sections, _MIN_STACK_SIZE, symbols)
    found = {}
    for name in sorted(name for name in registers if f".text.{name}" in sections):
        shared = sections.get(f".nv.shared.{name}")
        size = shared.size if shared else 0
        reserved = _RESERVED_SHARED if ".nv.shared.reserved.0" in sections else 0
        spills = _count_spills(sections.get(f".nv.info.{name}"))
        found[name] = Resources(
            registers[name], max(size - reserved, 0), stack.get(name, 0), spills
        )
    return found


def _sections(cubin: bytes, header: tuple[int, ...]) -> dict[str, _Section]:
    table, entry_size, count, names_at = header[6], header[11], header[12], header[13]
    rows = [_SECTION.unpack_from(cubin, table + i * entry_size) for i in range(count)]
    names = cubin[rows[names_at][4] :][: rows[names_at][5]]
    found = {}
    for name, kind, _, _, offset, size, *_ in rows:
        data = b"" if kind == _SHT_NOBITS else cubin[offset : offset + size]
        found[_text(names, name)] = _Section(kind, data, size)
    return found


def _symbols(sections: dict[str, _Section]) -> list[str]:
    """Return the names of all symbols in order, "" for those that are not kernels."""
    names, table = sections[".strtab"].data, sections[".symtab"].data
    found = []
    for name, info, *_ in _SYMBOL.iter_unpack(table):
        is_kernel = info & 0xF == _STT_FUNC and info >> 4 == _STB_GLOBAL
        found.append(_text(names, name) if is_kernel else "")
    return found


def _by_symbol(sections: dict[str, _Section], attribute: int, symbols: list[str]) -> dict[str, int]:
    """Return kernel -> value of an attribute that .nv.info holds once per function."""
    values = (v for kind, v in _attributes(sections[".nv.info"].data) if kind == attribute)
    pairs = (struct.unpack("<II", value) for value in values)
    return {symbols[symbol]: value for symbol, value in pairs if symbols[symbol]}


def _count_spills(info: _Section | None) -> int:
    if info is None:
        return 0
    notes = (value for kind, value in _attributes(info.data) if kind == _ANNOTATIONS)
    return sum(kind == _SPILL for note in notes for kind, _ in struct.iter_unpack("<II", note))


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, kind, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _WITH_SIZE:
            yield kind, data[at : at + size]
            at += size


def _text(names: bytes, start: int) -> str:
    return names[start : names.index(b"\0", start)].decode()
