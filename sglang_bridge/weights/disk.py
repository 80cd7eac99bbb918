"""Writes buckets as a Hugging Face checkpoint that engines load from a shared file system."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from sglang_bridge.admin import AdminClient
from sglang_bridge.weights.buckets import Bucket
from sglang_bridge.weights.calls import Failures, call_each


class DiskTransport:
    """Sends weights through files.

    directory: on a file system that every engine sees. config_from: a checkpoint whose config.json
    is copied. timeout_seconds: of each engine's loading.
    """

    def __init__(self, *, directory: Path, config_from: Path, timeout_seconds: float) -> None:
        self._directory = directory.resolve()
        self._config_from = config_from
        self._timeout = timeout_seconds
        self._shard_of: dict[str, str] = {}
        self._bytes = 0

    @property
    def device(self) -> torch.device:
        """The device on which buckets must be."""
        return torch.device("cpu")

    def connect(self, admins: Sequence[AdminClient]) -> Failures:
        """Do nothing: files need no connection."""
        return {}

    def begin(self, admins: Sequence[AdminClient], version: int) -> Failures:
        """Start an empty directory for this version."""
        self._remove()
        path = self._path(version)
        path.mkdir(parents=True)
        shutil.copy(self._config_from / "config.json", path)
        self._shard_of = {}
        self._bytes = 0
        return {}

    def send(self, bucket: Bucket, admins: Sequence[AdminClient], version: int) -> Failures:
        """Write one bucket as one file."""
        name = f"model-{len(set(self._shard_of.values())):05d}.safetensors"
        tensors = dict(bucket.tensors())
        save_file(tensors, self._path(version) / name)
        self._shard_of |= dict.fromkeys(tensors, name)
        self._bytes += bucket.flat.numel()
        return {}

    def end(self, admins: Sequence[AdminClient], version: int) -> Failures:
        """Write the index and let every engine load the directory."""
        path = self._path(version)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._shard_of}
        (path / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))
        return call_each(
            admins,
            lambda admin: admin.update_weights_from_disk(
                str(path), weight_version=str(version), timeout=self._timeout
            ),
        )

    def forget(self, admin: AdminClient) -> None:
        """Do nothing: the transport keeps no state of an engine."""

    def close(self) -> None:
        """Remove the files."""
        self._remove()

    def _path(self, version: int) -> Path:
        return self._directory / f"version-{version}"

    def _remove(self) -> None:
        for path in self._directory.glob("version-*"):
            shutil.rmtree(path)
