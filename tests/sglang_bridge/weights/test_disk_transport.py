"""Weights that engines load from a checkpoint on disk."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.keys import create_keys
from sglang_bridge.weights.crew import SendReport
from sglang_bridge.weights.disk import DiskTransport

LATER = time.monotonic() + 86_400  # the tests may run long after this line


class LoadingAdmin(AdminClient):
    """Loads the files, as an engine would."""

    def __init__(self) -> None:
        super().__init__(Engine(url="http://127.0.0.1:1"), create_keys())
        self.weights: dict[str, torch.Tensor] = {}

    def update_weights_from_disk(self, model_path: str, *, timeout: float) -> None:
        if not (Path(model_path) / "config.json").exists():
            raise RequestFailed("no config")
        for file in sorted(Path(model_path).glob("*.safetensors")):
            self.weights |= load_file(file)


def open_transport(folder: Path, rank: int = 0) -> DiskTransport:
    return DiskTransport(
        directory=folder / "sync", config_from=folder / "start", timeout_seconds=5, rank=rank
    )


def send(
    transport: DiskTransport, admin: AdminClient, weights: dict[str, torch.Tensor], version: int
) -> SendReport:
    stream = iter(weights.items())
    return transport.send(stream, [admin], version, bucket_bytes=32, deadline=LATER)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "config.json").write_text("{}")
    return tmp_path


def make_weights(names: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.randn(3, 2).to(dtype) for name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_version_is_complete_and_replaces_the_previous_one(
    folder: Path, dtype: torch.dtype
) -> None:
    admin = LoadingAdmin()
    transport = open_transport(folder)
    for version in (1, 2):
        weights = make_weights("abc", dtype)
        assert transport.connect([admin]) == {}
        assert transport.begin([admin], version, LATER) == {}
        report = send(transport, admin, weights, version)
        assert (report.num_tensors, report.bytes_sent) == (3, {admin.url: 18 * dtype.itemsize})
        assert transport.end([admin], version, LATER) == {}
        assert all(torch.equal(admin.weights[name], weights[name]) for name in "abc")
        assert [path.name for path in (folder / "sync").iterdir()] == [f"version-{version}"]
    transport.close()
    assert list((folder / "sync").iterdir()) == []


def test_every_owner_writes_its_own_files(folder: Path) -> None:
    admin = LoadingAdmin()
    first = open_transport(folder)
    second = open_transport(folder, rank=1)
    weights = make_weights("abcd")
    first.begin([admin], 1, LATER)
    send(second, admin, {name: weights[name] for name in "cd"}, 1)
    send(first, admin, {name: weights[name] for name in "ab"}, 1)
    second.close()
    assert first.end([admin], 1, LATER) == {}
    assert all(torch.equal(admin.weights[name], weights[name]) for name in "abcd")
    path = folder / "sync" / "version-1"
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set("abcd")
    assert index["metadata"]["total_size"] == 4 * 24
    files = {file.name for file in path.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files


def test_a_tensor_of_two_owners_is_refused(folder: Path) -> None:
    admin = LoadingAdmin()
    first = open_transport(folder)
    second = open_transport(folder, rank=1)
    first.begin([admin], 1, LATER)
    send(first, admin, make_weights("ab"), 1)
    send(second, admin, make_weights("b"), 1)
    with pytest.raises(ValueError, match="weight b: sent twice, by two owners"):
        first.end([admin], 1, LATER)


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077, 0o027])
def test_an_engine_of_another_user_may_read_the_files_that_the_umask_allows(
    folder: Path, umask: int
) -> None:
    (folder / "start/config.json").chmod(0o600)
    before = os.umask(umask)
    try:
        transport = open_transport(folder)
        transport.begin([], 1, LATER)
        send(transport, LoadingAdmin(), make_weights("ab", torch.bfloat16), version=1)
        transport.end([], 1, LATER)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.glob("sync/version-1/*")}
    assert len(modes) > 2
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)
