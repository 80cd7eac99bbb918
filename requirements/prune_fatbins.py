"""Keep the machine code of one GPU architecture in the fat binaries of a shared library.

CUDA stores the code of each kernel once for every architecture, in section `.nv_fatbin`. A library
for one architecture keeps its size, but most of it becomes zeros, which compress to nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

SECTION = b".nv_fatbin"
# A fat binary: magic, version, size of this header, size of the entries after it
_BINARY = struct.Struct("<IHHQ")
_MAGIC = 0xBA55ED50
# An entry: kind, version, size of its header, size of its code; the architecture is 28 bytes in
_ENTRY = struct.Struct("<HHIQ")
_ARCHITECTURE_OFFSET = 28
_MACHINE_CODE = 2  # kind of an entry; 1 is PTX
_ALIGNMENT = 8


@dataclass
class Counts:
    """What pruning did.

    binaries: fat binaries. incomplete: those without machine code for the architecture; they stay
    whole. kept_bytes: bytes of code that stay.
    """

    binaries: int = 0
    incomplete: int = 0
    kept_bytes: int = 0


def prune_library(data: bytearray, architecture: int) -> Counts:
    """Prune the section `.nv_fatbin` of a 64-bit ELF library in place.

    Raises ValueError if `data` is no such library.
    """
    start, end = find_section(data, SECTION)
    return prune_section(data, start, end, architecture)


def prune_section(data: bytearray, start: int, end: int, architecture: int) -> Counts:
    """Prune the fat binaries between two offsets in place."""
    counts = Counts()
    position = start
    while position + _BINARY.size <= end:
        magic, _version, header_size, entries_size = _BINARY.unpack_from(data, position)
        if magic != _MAGIC:
            position += _ALIGNMENT
            continue
        first_entry = position + header_size
        stop = first_entry + entries_size
        if stop > end:
            raise ValueError(f"the fat binary at offset {position} is longer than its section")
        code = _machine_code(data, first_entry, stop, architecture)
        counts.binaries += 1
        if code:
            struct.pack_into("<Q", data, position + 8, len(code))
            data[first_entry:stop] = code + bytes(entries_size - len(code))
            counts.kept_bytes += len(code)
        else:
            counts.incomplete += 1
            counts.kept_bytes += entries_size
        position = stop
    return counts


def find_section(data: bytes | bytearray, name: bytes) -> tuple[int, int]:
    """Return the offsets between which a section of a 64-bit ELF file lies."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("this is no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)

    def section(index: int) -> tuple[int, int, int]:
        base = table + index * entry_size
        (name_offset,) = struct.unpack_from("<I", data, base)
        offset, size = struct.unpack_from("<QQ", data, base + 0x18)
        return name_offset, offset, size

    names = section(names_index)[1]
    for index in range(count):
        name_offset, offset, size = section(index)
        begin = names + name_offset
        if data[begin : begin + len(name) + 1] == name + b"\0":
            return offset, offset + size
    raise ValueError(f"the library has no section {name.decode()}")


def _machine_code(data: bytearray, start: int, stop: int, architecture: int) -> bytes:
    entries = []
    position = start
    while position < stop:
        kind, _version, header_size, code_size = _ENTRY.unpack_from(data, position)
        (entry_architecture,) = struct.unpack_from("<I", data, position + _ARCHITECTURE_OFFSET)
        size = header_size + code_size
        if size == 0:
            break
        if kind == _MACHINE_CODE and entry_architecture == architecture:
            entries.append(bytes(data[position : position + size]))
        position += size
    return b"".join(entries)
