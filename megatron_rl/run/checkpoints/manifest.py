"""What a checkpoint holds, file by file: a manifest by which a damaged one is told from a whole
one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megatron_rl.contracts.wire_types import Count
from megatron_rl.records.durable_files import sync_folder, write_synced

NAME = "manifest.json"
_FORMAT = 1


class FileRecord(msgspec.Struct, frozen=True):
    """One file as it was saved. sha256: in hexadecimal digits."""

    nbytes: Count
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All files of one checkpoint but the manifest itself, by name relative to it."""

    step: Count
    files: dict[str, FileRecord]
    format: int = _FORMAT

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.files.values())


class DamagedCheckpoint(ValueError):
    """A checkpoint is not as it was saved."""


def list_files(directory: Path) -> list[str]:
    """The names of all files below a directory, the manifest left out, sorted."""
    found = (
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )
    return sorted(name for name in found if name != NAME)


def hash_file(file: Path) -> FileRecord:
    """Size and digest of a file, which has reached the disk when this returns."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        nbytes = stream.tell()
        os.fsync(stream.fileno())
    return FileRecord(nbytes, digest)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint; it and the names of all files have reached the disk when this
    returns.
    """
    write_synced(
        directory / NAME, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    )
    for folder in {(directory / name).parent for name in manifest.files} | {directory}:
        sync_folder(folder)


def read_manifest(directory: Path) -> Manifest:
    """Raises `DamagedCheckpoint`, also where a file has another size than it was saved with."""
    try:
        manifest = msgspec.json.decode((directory / NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{NAME} cannot be read ({error})") from error
    if manifest.format != _FORMAT:
        raise DamagedCheckpoint(
            f"{NAME} is of format {manifest.format}, and this version reads {_FORMAT}"
        )
    for name, record in manifest.files.items():
        file = directory / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{name} is missing")
        if (nbytes := file.stat().st_size) != record.nbytes:
            raise DamagedCheckpoint(f"{name} has {nbytes} bytes instead of {record.nbytes}")
    return manifest


def changed_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Those of `names` whose bytes are not what was saved, with the reason."""
    found = []
    for name in names:
        try:
            if hash_file(directory / name) != manifest.files[name]:
                found.append(f"{name} is not what was saved (its sha256 differs)")
        except OSError as error:
            found.append(f"{name} cannot be read ({error})")
    return found
