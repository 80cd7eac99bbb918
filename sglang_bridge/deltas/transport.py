"""A transport that writes what changed to a shared disk, for copies on the engines' nodes."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from safetensors.torch import save

from sglang_bridge.admin import AdminClient
from sglang_bridge.deltas.codec import Bytes, compress_change, digest
from sglang_bridge.deltas.manifest import CONFIG, INDEX, Manifest, StoredFile, write_manifest
from sglang_bridge.deltas.weight_copy import map_bytes
from sglang_bridge.weights.buckets import Bucket, NamedTensors, iterate_buckets
from sglang_bridge.weights.calls import Failures, call_each
from sglang_bridge.weights.crew import SendReport


@dataclass(frozen=True)
class CopyReply:
    """A node's answer to a push.

    path: the rebuilt weights on that node. reason: why there are none, empty otherwise.
    """

    path: str = ""
    reason: str = ""


@dataclass
class _Push:
    """A push that is being written.

    files: what the manifest will list. shard_of: the file of each tensor. num_bytes, num_stored,
    num_changed: of the complete files, of what travels, and of bytes that differ.
    """

    sequence: int
    base: int | None
    files: list[StoredFile] = field(default_factory=list)
    shard_of: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    num_stored: int = 0
    num_changed: int = 0


class DeltaTransport:
    """Sends weights as changes of the weights that it sent before.

    A node whose copy cannot take a change gets the complete weights in the same update, and `log`
    says why. Whatever the update is for, every copy follows it, so that each change has its base.

    directory: on a file system that all nodes share. scratch: on this node's own disk; it holds the
    complete weights twice while a push is written. config_from: a checkpoint whose config.json is
    copied. timeout_seconds: of each engine's loading.
    nodes: nodes that hold a copy of the weights. rebuild: lets nodes rebuild the weights of a push,
    and waits for an answer of each.
    """

    def __init__(
        self,
        *,
        directory: Path,
        scratch: Path,
        config_from: Path,
        nodes: Sequence[int],
        rebuild: Callable[[Path, Sequence[int]], Mapping[int, CopyReply]],
        timeout_seconds: float,
        log: Callable[[str], None],
    ) -> None:
        self._directory = directory.resolve()
        self._scratch = scratch
        self._config_from = config_from
        self._nodes = nodes
        self._rebuild = rebuild
        self.timeout_seconds = timeout_seconds
        self._log = log
        self._stream = uuid.uuid4().hex
        self._last_sequence = 0
        self._base: Manifest | None = None
        self._push = _Push(0, None)

    def connect(self, admins: Sequence[AdminClient]) -> Failures:
        """Do nothing: files need no connection."""
        return {}

    def begin(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        """Start an empty directory."""
        # An update that broke leaves its number unused
        self._last_sequence += 1
        base = None if self._base is None else self._base.sequence
        self._push = _Push(self._last_sequence, base)
        self._remove_pushes()
        self._remove_copies(keep=base)
        self._push_path("push").mkdir(parents=True)
        self._local(self._push.sequence).mkdir(parents=True)
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
        """Write each bucket as one file. Rank 0 sends all tensors, and nobody else any."""
        push = self._push
        for bucket in iterate_buckets(
            tensors, bucket_bytes=bucket_bytes, device=torch.device("cpu")
        ):
            self._write(bucket)
        return SendReport(
            num_tensors=len(push.shard_of),
            bytes_sent={admin.url: push.num_stored for admin in admins},
        )

    def _write(self, bucket: Bucket) -> None:
        """Write a bucket's change, or all of it if that is smaller."""
        push = self._push
        name = f"model-{len(push.files):05d}.safetensors"
        tensors = dict(bucket.tensors())
        data = np.frombuffer(save(tensors), dtype=np.uint8)
        data.tofile(self._local(push.sequence) / name)
        push.shard_of |= dict.fromkeys(tensors, name)
        width = max(tensors.values(), key=lambda tensor: tensor.nbytes).itemsize
        self._store(name, data, width=1 if len(data) % width else width)

    def end(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        """Let every node rebuild the weights, and every engine load its node's weights.

        Nothing was sent if no engine took part. The copies then stay as they are.
        """
        push = self._push
        if not push.files:
            return {}
        manifest = self._manifest(version, push.base, push.files)
        path = self._push_path("push")
        self._finish(path, manifest)
        replies = dict(self._rebuild(path, self._nodes))
        replies |= self._send_whole(version, replies)
        for admin in admins:
            replies.setdefault(admin.engine.node, CopyReply(reason="its node holds no copy"))
        # Copies that took the push hold it now, whatever becomes of the engines
        self._base = manifest
        failures = {
            admin.url: reason for admin in admins if (reason := replies[admin.engine.node].reason)
        }
        ready = [admin for admin in admins if admin.url not in failures]
        return failures | call_each(
            ready,
            lambda admin: admin.update_weights_from_disk(
                replies[admin.engine.node].path, timeout=self.timeout_seconds
            ),
            deadline=deadline,
        )

    def forget(self, admin: AdminClient) -> None:
        """Do nothing: an engine loads a complete copy, also after a new start."""

    def close(self) -> None:
        """Remove the files."""
        self._remove_pushes()
        self._remove_copies(keep=None)

    def measure(self) -> dict[str, float]:
        """Return the metrics of the last push; none if it sent nothing."""
        push = self._push
        if not push.num_bytes:
            return {}
        values = {
            "sync/delta/bytes": float(push.num_stored),
            "sync/delta/share": push.num_stored / push.num_bytes,
        }
        if push.base is not None:
            values["sync/delta/changed"] = push.num_changed / push.num_bytes
        return values

    def _store(self, name: str, data: Bytes, *, width: int) -> None:
        """Write what travels of one file, and note it. width: as in `compress_change`."""
        push = self._push
        base = self._base_file(name, len(data))
        encoding: Literal["whole", "change"] = "whole"
        payload: bytes | memoryview = data.data
        push.num_changed += len(data)
        if base is not None:
            change = compress_change(data, base, width=width)
            push.num_changed += change.num_changed - len(data)
            if len(change.data) < len(data):
                encoding = "change"
                payload = change.data
        file = StoredFile(
            name=name, size=len(data), digest=digest(data), encoding=encoding, width=width
        )
        (self._push_path("push") / file.stored_name).write_bytes(payload)
        push.files.append(file)
        push.num_bytes += len(data)
        push.num_stored += len(payload)

    def _base_file(self, name: str, size: int) -> Bytes | None:
        """Map the last version of a file. None without one of the same size."""
        if self._base is None:
            return None
        sizes = {file.name: file.size for file in self._base.files}
        if sizes.get(name) != size:
            return None
        return map_bytes(self._local(self._base.sequence) / name)

    def _send_whole(
        self, version: int, replies: Mapping[int, CopyReply]
    ) -> Mapping[int, CopyReply]:
        """Send complete weights to nodes that could not take the push."""
        nodes = [node for node, reply in replies.items() if reply.reason]
        if not nodes:
            return {}
        for node in nodes:
            self._log(f"node {node} gets complete weights: {replies[node].reason}")
        path = self._push_path("whole")
        path.mkdir()
        files = [msgspec.structs.replace(file, encoding="whole") for file in self._push.files]
        for file in files:
            shutil.copyfile(self._local(self._push.sequence) / file.name, path / file.name)
            self._push.num_stored += file.size
        self._finish(path, self._manifest(version, None, files))
        return self._rebuild(path, nodes)

    def _manifest(self, version: int, base: int | None, files: Sequence[StoredFile]) -> Manifest:
        has_changes = any(file.encoding == "change" for file in files)
        return Manifest(
            stream=self._stream,
            sequence=self._push.sequence,
            base=base if has_changes else None,
            version=version,
            files=tuple(files),
        )

    def _finish(self, path: Path, manifest: Manifest) -> None:
        """Write the small files of a push, the manifest last."""
        shutil.copyfile(self._config_from / CONFIG, path / CONFIG)
        index = {
            "metadata": {"total_size": self._push.num_bytes},
            "weight_map": self._push.shard_of,
        }
        (path / INDEX).write_bytes(msgspec.json.encode(index))
        write_manifest(path, manifest)

    def _push_path(self, kind: str) -> Path:
        return self._directory / f"{kind}-{self._push.sequence}"

    def _local(self, sequence: int) -> Path:
        return self._scratch / f"sent-{sequence}"

    def _remove_pushes(self) -> None:
        for kind in ("push", "whole"):
            for path in self._directory.glob(f"{kind}-*"):
                shutil.rmtree(path)

    def _remove_copies(self, *, keep: int | None) -> None:
        for path in self._scratch.glob("sent-*"):
            if keep is None or path != self._local(keep):
                shutil.rmtree(path)
