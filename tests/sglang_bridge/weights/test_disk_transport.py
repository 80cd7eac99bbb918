"""Weights that engines load from a checkpoint on disk."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.keys import create_keys
from sglang_bridge.weights.buckets import iterate_buckets
from sglang_bridge.weights.disk import DiskTransport


class LoadingAdmin(AdminClient):
    """Loads the files, as an engine would."""

    def __init__(self) -> None:
        super().__init__(Engine(url="http://127.0.0.1:1"), create_keys())
        self.weights: dict[str, torch.Tensor] = {}
        self.version = ""

    def update_weights_from_disk(
        self, model_path: str, *, weight_version: str, timeout: float
    ) -> None:
        if not (Path(model_path) / "config.json").exists():
            raise RequestFailed("no config")
        for file in sorted(Path(model_path).glob("*.safetensors")):
            self.weights |= load_file(file)
        self.version = weight_version


def push(
    transport: DiskTransport, admin: AdminClient, weights: dict[str, torch.Tensor], version: int
) -> None:
    assert transport.connect([admin]) == {}
    assert transport.begin([admin], version) == {}
    for bucket in iterate_buckets(iter(weights.items()), bucket_bytes=32, device=transport.device):
        assert transport.send(bucket, [admin], version) == {}
    assert transport.end([admin], version) == {}


def test_version_is_complete_and_replaces_the_previous_one(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "config.json").write_text("{}")
    admin = LoadingAdmin()
    transport = DiskTransport(
        directory=tmp_path / "sync", config_from=tmp_path / "start", timeout_seconds=5
    )
    for version in (1, 2):
        weights = {name: torch.randn(3, 2) for name in "abc"}
        push(transport, admin, weights, version)
        assert admin.version == str(version)
        assert all(torch.equal(admin.weights[name], weights[name]) for name in "abc")
        assert [path.name for path in (tmp_path / "sync").iterdir()] == [f"version-{version}"]
    transport.close()
    assert list((tmp_path / "sync").iterdir()) == []
