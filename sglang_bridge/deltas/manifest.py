"""The list of the files of one push."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sglang_bridge.deltas.codec import BrokenDelta

MANIFEST = "manifest.json"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,80}\.safetensors$"
_MAX_MANIFEST_BYTES = 2**28


class StoredFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of weights.

    name: of the complete file. size, digest: of the complete file. encoding: "whole" stores the
    complete file under `name`, "change" the compressed change against the base under
    `name` + ".change". width: of a change, as in `compress_change`.
    """

    name: Annotated[str, msgspec.Meta(pattern=_NAME)]
    size: Annotated[int, msgspec.Meta(ge=1)]
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    encoding: Literal["whole", "change"]
    width: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1

    @property
    def stored_name(self) -> str:
        """The name of the file in the directory of the push."""
        return self.name if self.encoding == "whole" else f"{self.name}.change"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One push: complete, or a change of the push before.

    stream: names the sender since its start. sequence: counts its pushes from 1. base: the sequence
    that changes refer to; None if every file is whole. version: of the weights.
    """

    stream: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    sequence: Annotated[int, msgspec.Meta(ge=1)]
    base: Annotated[int, msgspec.Meta(ge=1)] | None
    version: int
    files: tuple[StoredFile, ...]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest. Whoever sees it sees all files of the push complete."""
    part = directory / f"{MANIFEST}.part"
    part.write_bytes(msgspec.json.encode(manifest))
    os.replace(part, directory / MANIFEST)


def read_manifest(directory: Path) -> Manifest:
    """Read a manifest. Raises `BrokenDelta` naming the file."""
    path = directory / MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise BrokenDelta(f"{path} is too large")
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise BrokenDelta(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BrokenDelta(f"{path}: {error}") from error
    names = {file.name for file in manifest.files}
    if len(names) != len(manifest.files) or not names:
        raise BrokenDelta(f"{path}: it lists no file, or one twice")
    if manifest.base is None and any(file.encoding == "change" for file in manifest.files):
        raise BrokenDelta(f"{path}: it lists changes without a base")
    return manifest
