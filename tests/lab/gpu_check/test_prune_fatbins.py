"""`requirements/prune_fatbins.py` keeps the machine code of one architecture."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scripts import ROOT

sys.path.insert(0, str(ROOT / "requirements"))

import prune_fatbins

PTX = 1
MACHINE_CODE = 2
HEADER_BYTES = 64


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    """An entry of a fat binary, whose header has 64 bytes."""
    header = bytearray(HEADER_BYTES)
    struct.pack_into("<HHIQ", header, 0, kind, 0x101, HEADER_BYTES, len(code))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + code


def binary(*entries: bytes) -> bytes:
    """A fat binary of entries."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_code_of_one_architecture_stays_and_the_rest_becomes_zeros() -> None:
    """Sizes and positions of the fat binaries stay; PTX of the architecture goes too."""
    hopper = entry(MACHINE_CODE, 90, b"h" * 40)
    first = binary(entry(MACHINE_CODE, 80, b"a" * 24), hopper, entry(PTX, 90, b"p" * 8), hopper)
    second = binary(entry(MACHINE_CODE, 90, b"z" * 16))
    data = bytearray(first + bytes(8) + second + b"after!!!")
    counts = prune_fatbins.prune_section(data, 0, len(data), 90)
    assert counts == prune_fatbins.Counts(binaries=2, incomplete=0, kept_bytes=208 + 80)
    kept = hopper + hopper
    assert data[:16] == struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(kept))
    assert data[16 : 16 + len(kept)] == kept
    assert not any(data[16 + len(kept) : len(first)])
    assert data[len(first) + 8 :] == second + b"after!!!"


def test_a_binary_without_the_architecture_stays_whole_and_is_counted() -> None:
    data = bytearray(binary(entry(MACHINE_CODE, 80, b"a" * 24)))
    before = bytes(data)
    counts = prune_fatbins.prune_section(data, 0, len(data), 90)
    assert (counts.binaries, counts.incomplete) == (1, 1)
    assert data == before


def test_a_binary_that_ends_after_its_section_is_refused() -> None:
    data = bytearray(binary(entry(MACHINE_CODE, 90, b"a" * 24)))
    with pytest.raises(ValueError, match="longer than its section"):
        prune_fatbins.prune_section(data, 0, len(data) - 8, 90)


def test_a_section_is_found_by_its_name_in_a_real_library(tmp_path: Path) -> None:
    """A library with a section `.nv_fatbin`, built by the assembler."""
    source = tmp_path / "library.s"
    fat = binary(entry(MACHINE_CODE, 80, b"a" * 8), entry(MACHINE_CODE, 90, b"b" * 8))
    numbers = ",".join(str(byte) for byte in fat)
    source.write_text(f'.section .nv_fatbin, "a"\n.align 8\n.byte {numbers}\n')
    library = tmp_path / "library.so"
    subprocess.run(["cc", "-shared", "-o", str(library), str(source)], check=True)
    data = bytearray(library.read_bytes())
    start, end = prune_fatbins.find_section(data, b".nv_fatbin")
    assert bytes(data[start:end]) == fat
    counts = prune_fatbins.prune_library(data, 90)
    assert (counts.binaries, counts.kept_bytes) == (1, 72)
    assert bytes(data[start + 16 : start + 88]) == entry(MACHINE_CODE, 90, b"b" * 8)


def test_what_is_no_library_is_refused() -> None:
    with pytest.raises(ValueError, match="no 64-bit ELF file"):
        prune_fatbins.find_section(b"MZ" + bytes(100), b".nv_fatbin")
