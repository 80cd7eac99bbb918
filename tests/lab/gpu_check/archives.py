"""Archives of packages that were carried to this machine: which fit it, and where they are.

`make gpu-carry` writes them, with `manifest.json`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import lzma
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.gpu_check.facts import Facts

# Facts that must be the manifest's. Compiled modules need their Python, and Transformer Engine's
# extension also the torch that it was compiled with.
NEEDS = {
    "base": ("python",),
    "te": ("python", "torch", "cuda", "architecture"),
    "engine": ("python",),
}
_SPARE_BYTES = 100 << 20


class CarryError(Exception):
    """The folder of the archives cannot be used. The text says why, with a remedy."""


@dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`.

    folder: where the archives are. versions: by the names of `Facts`.
    """

    folder: Path
    versions: Mapping[str, Any]
    archives: Mapping[str, Mapping[str, Any]]


@dataclass
class Archives:
    """Archives on this machine.

    paths: where the packages of archives are that fit. refusals: why others are not used.
    """

    paths: dict[str, Path] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    def refuse(self, name: str, reason: str) -> None:
        """Leave an archive out."""
        self.paths.pop(name, None)
        self.refusals[name] = reason

    def obstacle(self, names: Iterable[str]) -> str:
        """Return why one of the archives is not used, empty if all are."""
        return next(
            (f"archive {name}: {self.refusals[name]}" for name in names if name in self.refusals),
            "",
        )

    def describe(self) -> dict[str, str]:
        """Say of each archive if it is used, or why not."""
        return dict.fromkeys(self.paths, "used") | self.refusals


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json`. Raises `CarryError`."""
    file = folder / "manifest.json"
    try:
        record = json.loads(file.read_text())
        archives = {name: dict(record["archives"][name]) for name in NEEDS}
        for archive in archives.values():
            archive["unpacked_bytes"] = int(archive["unpacked_bytes"])
            if not re.fullmatch("[0-9a-f]{64}", archive["sha256"]):
                raise ValueError(f"sha256={archive['sha256']!r} is no checksum")
            if Path(archive["file"]).name != archive["file"]:
                raise ValueError(f"file={archive['file']!r} is no name of a file")
        versions = {key: record[key] for key in ("python", "torch", "triton", "cuda")}
        versions["architecture"] = int(record["architecture"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CarryError(
            f"--carry {folder}: {file.name} cannot be used ({type(error).__name__}: {error}). Give "
            "the folder that `make gpu-carry` writes"
        ) from error
    return Manifest(folder, versions, archives)


def open_archives(
    manifest: Manifest,
    names: Iterable[str],
    facts: Facts,
    *,
    small: bool,
    log: Callable[[str], None],
) -> Archives:
    """Unpack archives that fit this machine, unless an earlier call did.

    small: True where no GPU is used, so that its architecture does not matter. log: writes a line
    for people. Raises `CarryError`, and `OSError` if nothing can be written to TMPDIR.
    """
    result = Archives()
    target = _open_target()
    for name in names:
        problem = _misfit(name, manifest, facts, small=small)
        if not problem:
            log(f"unpacking {name}")
            with _lock(target):
                problem = _unpack(manifest, name, target)
        if problem:
            result.refuse(name, problem)
        else:
            result.paths[name] = target / manifest.archives[name]["sha256"]
    return result


def _misfit(name: str, manifest: Manifest, facts: Facts, *, small: bool) -> str:
    """Return why an archive does not fit this machine, empty if it does."""
    for key in NEEDS[name]:
        if key == "architecture" and small:
            continue
        wanted_value = manifest.versions[key]
        value = getattr(facts, key)
        if key == "cuda" and value is not None:
            value = value.partition(".")[0]
        if value != wanted_value:
            return f"it is for {key} {wanted_value}, and this machine has {key} {value}"
    return ""


def _open_target() -> Path:
    """Return the folder of unpacked archives, which only this user can change."""
    target = Path(tempfile.gettempdir(), f"gpu-carry-{os.getuid()}")
    target.mkdir(mode=0o700, exist_ok=True)
    status = target.lstat()
    if status.st_uid != os.getuid() or target.is_symlink() or status.st_mode & 0o022:
        raise CarryError(
            f"{target} can be changed by others, who could replace the packages. Set TMPDIR to a "
            "folder of your own"
        )
    return target


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Wait until no other call unpacks. The lock ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _unpack(manifest: Manifest, name: str, target: Path) -> str:
    """Unpack one archive. Returns why that is impossible, empty if it is there.

    A folder under the checksum is complete, because it is renamed at the end.
    """
    archive = manifest.archives[name]
    file = manifest.folder / archive["file"]
    place = target / archive["sha256"]
    if place.is_dir():
        return ""
    try:
        with file.open("rb") as stream:
            checksum = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    if checksum != archive["sha256"]:
        return f"{file} is damaged: its SHA-256 is {checksum[:12]}..., not {place.name[:12]}..."
    free_bytes = shutil.disk_usage(target).free
    if free_bytes < archive["unpacked_bytes"] + _SPARE_BYTES:
        return (
            f"no space left on device: {target} has {free_bytes / 2**20:.0f} MiB free, and "
            f"{archive['unpacked_bytes'] / 2**20:.0f} MiB are unpacked. Set TMPDIR"
        )
    # Under a lock, what is left here comes from a call that was killed.
    part = target / f".{place.name}"
    shutil.rmtree(part, ignore_errors=True)
    try:
        with tarfile.open(file, "r:xz") as tar:
            tar.extractall(part, filter="data")
        part.rename(place)
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        return f"{file} cannot be unpacked: {error}"
    except OSError as error:
        return f"{file} cannot be unpacked to {target}: {error.strerror}"
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return ""
