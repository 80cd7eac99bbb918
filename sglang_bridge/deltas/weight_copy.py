"""The complete weights on one node, rebuilt from the pushes of one sender."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from sglang_bridge.deltas.codec import BrokenDelta, Bytes, apply_change, digest
from sglang_bridge.deltas.manifest import CONFIG, INDEX, Manifest, StoredFile, read_manifest


class WeightCopy:
    """The last complete weights on this node.

    Each push is rebuilt in a directory of its own, beside the one before, and verified there. The
    directory before is removed only then. So a path that `take` returns never holds files of two
    versions.

    directory: on the node's own disk, empty and of no other use.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._manifest: Manifest | None = None
        self._path: Path | None = None
        self._num_takes = 0

    def take(self, push: Path) -> Path:
        """Rebuild the weights of a push, and return the directory in Hugging Face format.

        push: the directory that the sender wrote. Raises `BrokenDelta` naming the file and what is
        wrong. The copy then is what it was before.
        """
        manifest = read_manifest(push)
        self._require_base(manifest)
        self._num_takes += 1
        target = self._directory / f"weights-{self._num_takes}"
        try:
            target.mkdir(parents=True)
            for file in manifest.files:
                self._rebuild(file, push, target)
            for name in (CONFIG, INDEX):
                shutil.copyfile(push / name, target / name)
        except (BrokenDelta, OSError) as error:
            shutil.rmtree(target, ignore_errors=True)
            if isinstance(error, BrokenDelta):
                raise
            raise BrokenDelta(f"{error.filename}: {error.strerror}") from error
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
        self._manifest = manifest
        self._path = target
        return target

    def _require_base(self, manifest: Manifest) -> None:
        """Raise `BrokenDelta` if the changes do not refer to what this node holds."""
        if manifest.base is None:
            return
        copy = self._manifest
        if copy is None:
            raise BrokenDelta(f"push {manifest.sequence} is a change, but this node holds no copy")
        if copy.stream != manifest.stream:
            raise BrokenDelta("this node holds a copy of another sender")
        if copy.sequence != manifest.base:
            raise BrokenDelta(
                f"push {manifest.sequence} changes push {manifest.base}, but this node holds "
                f"push {copy.sequence}"
            )

    def _rebuild(self, file: StoredFile, push: Path, target: Path) -> None:
        source = push / file.stored_name
        path = target / file.name
        if file.encoding == "whole":
            shutil.copyfile(source, path)
        else:
            assert self._path is not None  # a change has a base
            try:
                data = apply_change(
                    source.read_bytes(), map_bytes(self._path / file.name), width=file.width
                )
            except BrokenDelta as error:
                raise BrokenDelta(f"{source}: {error}") from error
            data.tofile(path)
        # What an engine will read, not what was meant to be written
        result = map_bytes(path)
        if len(result) != file.size or digest(result) != file.digest:
            raise BrokenDelta(f"{source}: the rebuilt {file.name} has another checksum or size")


def map_bytes(path: Path) -> Bytes:
    """Map a file into memory: uint8 [size]. Raises `BrokenDelta` for an empty or missing file."""
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise BrokenDelta(f"{path}: {error}") from error
