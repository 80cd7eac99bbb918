"""The manifest of a checkpoint: the size and hash of every file, which reveal damage."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megatron_rl.contracts.wire_types import Count
from megatron_rl.records.durable_files import sync_folder, write_synced

MANIFEST_NAME = "manifest.json"
_FORMAT = 1


class FileRecord(msgspec.Struct, frozen=True):
    """One file as it was saved. sha256: hexadecimal digits."""

    nbytes: Count
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All files of one checkpoint, except the manifest, by their relative names."""

    step: Count
    files: dict[str, FileRecord]
    format: int = _FORMAT

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.files.values())


class DamagedCheckpoint(ValueError):
    """A checkpoint has changed since it was saved."""


def list_files(directory: Path) -> list[str]:
    """The sorted relative names of all files in a directory, except the manifest."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    names = [path.relative_to(directory).as_posix() for path in files]
    return sorted(name for name in names if name != MANIFEST_NAME)


def hash_file(file: Path) -> FileRecord:
    """Flush a file to the disk, and compute its size and hash."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        nbytes = stream.tell()
        os.fsync(stream.fileno())
    return FileRecord(nbytes, digest)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, and flush it and the names of all files to the disk.

    Write it last: it completes the checkpoint.
    """
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    write_synced(directory / MANIFEST_NAME, text + b"\n")
    folders = {(directory / name).parent for name in manifest.files}
    for folder in folders | {directory}:
        sync_folder(folder)


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint, and compare the sizes of its files.

    Raises `DamagedCheckpoint`.
    """
    try:
        manifest = msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{MANIFEST_NAME} cannot be read ({error})") from error
    if manifest.format != _FORMAT:
        raise DamagedCheckpoint(
            f"{MANIFEST_NAME} has format {manifest.format}, but this version reads {_FORMAT}"
        )
    for name, record in manifest.files.items():
        file = directory / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{name} is missing")
        nbytes = file.stat().st_size
        if nbytes != record.nbytes:
            raise DamagedCheckpoint(f"{name} has {nbytes} bytes instead of {record.nbytes}")
    return manifest


def changed_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """The files among `names` that have changed since they were saved, each with the reason."""
    problems = []
    for name in names:
        try:
            if hash_file(directory / name) != manifest.files[name]:
                problems.append(f"{name} has changed since it was saved (its sha256 differs)")
        except OSError as error:
            problems.append(f"{name} cannot be read ({error})")
    return problems
