"""Writes a Hugging Face checkpoint that engines load from a shared file system."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from sglang_bridge.admin import AdminClient
from sglang_bridge.weights.buckets import NamedTensors, iterate_buckets
from sglang_bridge.weights.calls import Failures, call_each
from sglang_bridge.weights.crew import SendReport

_INDEX = "model.safetensors.index.json"


class _OwnerIndex(msgspec.Struct):
    """The files of one owner. shard_of: file by tensor."""

    num_bytes: int
    shard_of: dict[str, str]


class DiskTransport:
    """Sends weights through files. Every owner writes its own, and rank 0 the index.

    directory: on a file system that every rank and every engine sees. config_from: a checkpoint
    whose config.json is copied. timeout_seconds: of each engine's loading. rank: of this owner.
    """

    def __init__(
        self, *, directory: Path, config_from: Path, timeout_seconds: float, rank: int = 0
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._directory = directory.resolve()
        self._config_from = config_from
        self._rank = rank

    def connect(self, admins: Sequence[AdminClient]) -> Failures:
        """Do nothing: files need no connection."""
        return {}

    def begin(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        """Start an empty directory for this version."""
        self._remove()
        path = self._path(version)
        path.mkdir(parents=True)
        shutil.copyfile(self._config_from / "config.json", path / "config.json")
        return {}

    def send(
        self,
        tensors: NamedTensors,
        admins: Sequence[AdminClient],
        version: int,
        *,
        bucket_bytes: int,
        deadline: float,
    ) -> SendReport:
        """Write each bucket as one file."""
        path = self._path(version)
        shard_of: dict[str, str] = {}
        num_bytes = 0
        buckets = iterate_buckets(tensors, bucket_bytes=bucket_bytes, device=torch.device("cpu"))
        for count, bucket in enumerate(buckets):
            name = f"model-{self._rank:05d}-{count:05d}.safetensors"
            contents = dict(bucket.tensors())
            save_file(contents, path / name)
            # safetensors lets nobody but the owner read the file. The directory follows the umask.
            (path / name).chmod(path.stat().st_mode & 0o666)
            shard_of |= dict.fromkeys(contents, name)
            num_bytes += bucket.flat.numel()
        index = _OwnerIndex(num_bytes, shard_of)
        (path / f"owner-{self._rank:05d}.json").write_bytes(msgspec.json.encode(index))
        return SendReport(
            num_tensors=len(shard_of),
            bytes_sent={admin.url: num_bytes for admin in admins},
        )

    def end(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        """Join the owners' indices and let every engine load the directory.

        Raises `ValueError` for a tensor of two owners.
        """
        path = self._path(version)
        shard_of: dict[str, str] = {}
        num_bytes = 0
        for file in sorted(path.glob("owner-*.json")):
            part = msgspec.json.decode(file.read_bytes(), type=_OwnerIndex)
            for name in part.shard_of.keys() & shard_of.keys():
                raise ValueError(f"weight {name}: sent twice, by two owners")
            shard_of |= part.shard_of
            num_bytes += part.num_bytes
            file.unlink()
        index = {"metadata": {"total_size": num_bytes}, "weight_map": shard_of}
        (path / _INDEX).write_bytes(msgspec.json.encode(index))
        return call_each(
            admins,
            lambda admin: admin.update_weights_from_disk(str(path), timeout=self.timeout_seconds),
            deadline=deadline,
        )

    def forget(self, admin: AdminClient) -> None:
        """Do nothing: the transport keeps no state of an engine."""

    def close(self) -> None:
        """Remove the files."""
        if not self._rank:
            self._remove()

    def _path(self, version: int) -> Path:
        return self._directory / f"version-{version}"

    def _remove(self) -> None:
        for path in self._directory.glob("version-*"):
            shutil.rmtree(path)
