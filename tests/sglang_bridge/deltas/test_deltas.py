"""Copies of weights that are rebuilt from changes, and what they refuse."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file

from sglang_bridge.admin import AdminClient
from sglang_bridge.deltas.codec import BrokenDelta, apply_change, compress_change, digest
from sglang_bridge.deltas.manifest import MANIFEST, read_manifest
from sglang_bridge.deltas.transport import CopyReply, DeltaTransport
from sglang_bridge.deltas.weight_copy import WeightCopy
from sglang_bridge.engine import Engine
from sglang_bridge.keys import create_keys

Weights = dict[str, torch.Tensor]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.slow
@given(
    st.tuples(st.integers(1, 700), st.sampled_from([1, 2, 4, 8])).flatmap(
        lambda sizes: st.tuples(
            arrays.arrays(np.uint8, sizes[0] * sizes[1]),
            arrays.arrays(np.uint8, sizes[0] * sizes[1]),
            st.just(sizes[1]),
        )
    )
)
def test_a_change_restores_every_bit_pattern(
    versions: tuple[np.ndarray, np.ndarray, int],
) -> None:
    base, new, width = versions
    change = compress_change(new, base, width=width)
    assert np.array_equal(apply_change(change.data, base, width=width), new)
    assert change.num_changed == sum(a != b for a, b in zip(base, new, strict=True))


def test_changes_of_low_bytes_cost_less_where_bytes_lie_by_significance() -> None:
    base = np.zeros(2**16, dtype=np.uint8)
    new = base.copy()
    new[::2] = np.random.default_rng(0).integers(0, 8, 2**15)
    sizes = [len(compress_change(new, base, width=width).data) for width in (1, 2)]
    # Three bits of every second byte are 12,288 bytes.
    assert 12288 < sizes[1] < 0.85 * sizes[0]


def test_a_width_that_does_not_divide_the_file_is_refused() -> None:
    base = np.zeros(10, dtype=np.uint8)
    with pytest.raises(BrokenDelta, match="values of 4 bytes do not fill a file of 10"):
        apply_change(compress_change(base, base).data, base, width=4)


def test_equal_files_cost_nearly_nothing() -> None:
    data = np.random.default_rng(0).integers(0, 256, 2**20, dtype=np.uint8)
    change = compress_change(data, data)
    assert change.num_changed == 0
    assert len(change.data) < 100


@pytest.mark.parametrize("place", [0, 4, 20, -1])
def test_a_flipped_byte_of_a_change_is_refused_or_gives_other_bytes(place: int) -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, 5000, dtype=np.uint8)
    new = base.copy()
    new[::7] ^= 5
    data = bytearray(compress_change(new, base).data)
    data[place] ^= 1
    with pytest.raises(BrokenDelta):
        apply_change(bytes(data), base)


def test_a_change_of_a_larger_file_is_refused_before_it_is_decompressed() -> None:
    large = np.zeros(2**24, dtype=np.uint8)
    bomb = compress_change(large, large).data
    with pytest.raises(BrokenDelta, match="16777216 bytes, but the base has 10"):
        apply_change(bomb, np.zeros(10, dtype=np.uint8))


def test_bytes_after_a_change_are_refused() -> None:
    base = np.zeros(10, dtype=np.uint8)
    with pytest.raises(BrokenDelta):
        apply_change(compress_change(base, base).data + b"x", base)


class Node:
    """Copies in this process, and an engine on each node that loads what it is told.

    spoil: called with the directory of a push before each copy reads it.
    """

    def __init__(self, folder: Path, nodes: Sequence[int] = (0,)) -> None:
        self.folder = folder
        self.nodes = list(nodes)
        self.copies = {node: self.open_copy(node) for node in nodes}
        self.pushes: list[tuple[str, tuple[int, ...]]] = []
        self.answers: list[CopyReply] = []

    def open_copy(self, node: int) -> WeightCopy:
        path = self.folder / f"node-{node}"
        path.mkdir(parents=True, exist_ok=True)
        return WeightCopy(path)

    def spoil(self, push: Path) -> None:
        """Leave the push as it is."""

    def take(self, push: Path, nodes: Sequence[int]) -> Mapping[int, CopyReply]:
        self.pushes.append((push.name.partition("-")[0], tuple(nodes)))
        if push.name.startswith("push"):
            self.spoil(push)
        replies = {}
        for node in nodes:
            try:
                replies[node] = CopyReply(path=str(self.copies[node].take(push)))
            except BrokenDelta as error:
                replies[node] = CopyReply(reason=str(error))
        self.answers += replies.values()
        return replies


class LoadingAdmin(AdminClient):
    """Loads the files, as an engine would."""

    def __init__(self, node: int = 0) -> None:
        super().__init__(Engine(url=f"http://127.0.0.1:{node + 1}", node=node), create_keys())
        self.weights: Weights = {}

    def update_weights_from_disk(self, model_path: str, *, timeout: float) -> None:
        assert (Path(model_path) / "config.json").exists()
        index = json.loads((Path(model_path) / "model.safetensors.index.json").read_bytes())
        self.weights = {}
        for name in sorted(set(index["weight_map"].values())):
            self.weights |= load_file(Path(model_path) / name)
        assert set(self.weights) == set(index["weight_map"])


class Scene:
    """A sender, copies and engines."""

    def __init__(self, folder: Path, nodes: Sequence[int] = (0,)) -> None:
        self.folder = folder
        (folder / "start").mkdir()
        (folder / "start" / "config.json").write_text("{}")
        self.node = Node(folder, nodes)
        self.admins = [LoadingAdmin(node) for node in nodes]
        self.lines: list[str] = []
        self.transport = self.open_transport()

    def open_transport(self) -> DeltaTransport:
        return DeltaTransport(
            directory=self.folder / "sync",
            scratch=self.folder / "scratch",
            config_from=self.folder / "start",
            nodes=self.node.nodes,
            rebuild=self.node.take,
            timeout_seconds=5,
            log=self.lines.append,
        )

    def push(self, weights: Weights, version: int, *, bucket_bytes: int = 64) -> dict[str, str]:
        """Send weights; returns the failures."""
        transport = self.transport
        deadline = time.monotonic() + 60
        assert transport.connect(self.admins) == {}
        assert transport.begin(self.admins, version, deadline) == {}
        report = transport.send(
            iter(weights.items()),
            self.admins,
            version,
            bucket_bytes=bucket_bytes,
            deadline=deadline,
        )
        assert report.failures == {} and report.num_tensors == len(weights)
        return transport.end(self.admins, version, deadline)

    def leave_out_engines(self, version: int) -> None:
        """Send nothing, as an update does in which no engine takes part."""
        deadline = time.monotonic() + 60
        assert self.transport.begin([], version, deadline) == {}
        assert self.transport.end([], version, deadline) == {}

    def require(self, weights: Weights) -> None:
        """Every engine holds exactly these weights."""
        for admin in self.admins:
            assert set(admin.weights) == set(weights)
            for name, tensor in weights.items():
                assert bits(admin.weights[name]) == bits(tensor), name


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().view(torch.uint8).numpy().tobytes()


def make_weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(5, 40, generator=generator).to(dtype) for name in ("a", "b", "c", "d")
    }


def nudge(weights: Weights, name: str = "b") -> Weights:
    """The weights with one value changed."""
    tensor = weights[name].clone()
    tensor.view(torch.uint8)[0, 0] ^= 1
    return {**weights, name: tensor}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_engines_follow_changes(scene: Scene, dtype: torch.dtype) -> None:
    weights = make_weights(0, dtype)
    assert scene.push(weights, 0) == {}
    scene.require(weights)
    assert scene.transport.measure()["sync/delta/share"] == 1
    for version in (1, 2, 3):
        weights = nudge(weights)
        assert scene.push(weights, version) == {}
        scene.require(weights)
        values = scene.transport.measure()
        assert values["sync/delta/share"] < 0.3
        assert 0 < values["sync/delta/changed"] < 0.01
    assert scene.lines == []
    assert {kind for kind, _ in scene.node.pushes} == {"push"}


def test_one_version_is_left_everywhere(scene: Scene) -> None:
    weights = make_weights(0)
    for version in range(3):
        weights = nudge(weights)
        scene.push(weights, version)
    assert [path.name for path in (scene.folder / "sync").iterdir()] == ["push-3"]
    assert [path.name for path in (scene.folder / "node-0").iterdir()] == ["weights-3"]
    assert len(list((scene.folder / "scratch").iterdir())) <= 2
    scene.transport.close()
    assert list((scene.folder / "sync").iterdir()) == []
    assert list((scene.folder / "scratch").iterdir()) == []


def test_the_same_version_again_is_a_change_without_bytes(scene: Scene) -> None:
    weights = make_weights(0)
    scene.push(weights, 4)
    scene.push(weights, 4)
    scene.require(weights)
    assert scene.transport.measure()["sync/delta/changed"] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_names_shapes_and_dtypes_follow(scene: Scene, dtype: torch.dtype) -> None:
    scene.push(make_weights(0), 0)
    others = make_weights(1, dtype)
    others["e"] = torch.ones(7, dtype=dtype)
    del others["a"]
    scene.push(others, 1)
    scene.require(others)


VALUES = st.integers(0, 2**16 - 1)  # every bfloat16, NaN with a payload included


@settings(max_examples=settings.default.max_examples // 3)
@given(st.lists(st.lists(VALUES, min_size=1, max_size=40), min_size=1, max_size=5))
def test_random_histories(
    tmp_path_factory: pytest.TempPathFactory, versions: list[list[int]]
) -> None:
    scene = Scene(tmp_path_factory.mktemp("history"))
    for version, values in enumerate(versions):
        data = torch.tensor(values, dtype=torch.int32).to(torch.uint16)
        weights = {"a": data.view(torch.bfloat16), "b": torch.ones(3)}
        assert scene.push(weights, version) == {}
        scene.require(weights)
    assert scene.lines == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [truncate, flip, Path.unlink], ids=["torn", "flipped", "missing"])
@pytest.mark.parametrize("pattern", ["*.change", MANIFEST, "config.json"])
def test_a_broken_push_is_replaced_by_complete_weights(
    scene: Scene, spoil: object, pattern: str
) -> None:
    assert callable(spoil)
    if pattern == "config.json" and spoil is not Path.unlink:
        pytest.skip("an engine reads it, and it holds no weights")
    weights = make_weights(0)
    scene.push(weights, 0)

    def spoil_push(push: Path) -> None:
        spoil(next(iter(sorted(push.glob(pattern)))))

    scene.node.spoil = spoil_push  # type: ignore[method-assign]
    weights = nudge(weights)
    assert scene.push(weights, 1) == {}
    scene.require(weights)
    assert scene.node.pushes[-1] == ("whole", (0,))
    assert len(scene.lines) == 1 and "node 0 gets complete weights: " in scene.lines[0]
    assert scene.transport.measure()["sync/delta/share"] > 1
    del scene.node.spoil
    weights = nudge(weights, "c")
    scene.push(weights, 2)
    scene.require(weights)
    assert len(scene.lines) == 1


def test_a_node_that_missed_a_push_gets_complete_weights(tmp_path: Path) -> None:
    scene = Scene(tmp_path, nodes=(0, 1))
    weights = make_weights(0)
    scene.push(weights, 0)
    stale = scene.node.copies[1]
    scene.node.copies[1] = scene.node.open_copy(9)
    weights = nudge(weights)
    scene.push(weights, 1)
    assert "node 1 gets complete weights: push 2 is a change" in scene.lines[-1]
    scene.node.copies[1] = stale
    weights = nudge(weights)
    scene.push(weights, 2)
    scene.require(weights)
    assert "push 3 changes push 2, but this node holds push 1" in scene.lines[-1]
    assert scene.node.pushes[-1] == ("whole", (1,))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("num_syncs", [0, 2])
def test_a_sync_while_no_engine_serves_changes_no_base(
    scene: Scene, dtype: torch.dtype, num_syncs: int
) -> None:
    """num_syncs: with an engine, before. Its node keeps its copy while the engine starts again."""
    weights = make_weights(0, dtype)
    for version in range(num_syncs):
        weights = nudge(weights)
        scene.push(weights, version)
    num_pushes = len(scene.node.pushes)
    for version in (2, 3):
        scene.leave_out_engines(version)
        assert scene.transport.measure() == {}
    assert len(scene.node.pushes) == num_pushes
    weights = nudge(weights, "c")
    assert scene.push(weights, 4) == {}
    scene.require(weights)
    assert ("sync/delta/changed" in scene.transport.measure()) == bool(num_syncs)
    assert (scene.transport.measure()["sync/delta/share"] < 0.3) == bool(num_syncs)
    assert scene.lines == []


def test_a_new_sender_starts_with_complete_weights(scene: Scene) -> None:
    scene.push(make_weights(0), 0)
    scene.transport = scene.open_transport()
    weights = make_weights(1)
    scene.push(weights, 1)
    scene.require(weights)
    assert scene.lines == []
    push = next(iter((scene.folder / "sync").glob("push-*")))
    assert read_manifest(push).base is None


def test_a_change_of_another_sender_is_refused(scene: Scene) -> None:
    scene.push(make_weights(0), 0)
    other = scene.node.open_copy(5)
    other_scene_folder = scene.folder / "other"
    other_scene_folder.mkdir()
    other_scene = Scene(other_scene_folder)
    other_scene.push(make_weights(0), 0)
    other.take(next(iter((other_scene_folder / "sync").glob("push-*"))))
    scene.push(nudge(make_weights(0)), 1)
    with pytest.raises(BrokenDelta, match="another sender"):
        other.take(next(iter((scene.folder / "sync").glob("push-*"))))


def test_a_base_that_changed_on_the_disk_is_found(scene: Scene) -> None:
    weights = make_weights(0)
    scene.push(weights, 0)
    flip(sorted((scene.folder / "node-0" / "weights-1").glob("*.safetensors"))[0])
    weights = nudge(weights)
    scene.push(weights, 1)
    scene.require(weights)
    assert "another checksum" in scene.lines[0]


def test_weights_that_no_push_can_deliver_leave_the_engine_out(scene: Scene) -> None:
    weights = make_weights(0)
    scene.push(weights, 0)
    before = scene.admins[0].weights

    def refuse(push: Path) -> Path:
        raise BrokenDelta("the disk of this node is full")

    scene.node.copies[0].take = refuse  # type: ignore[method-assign]
    failures = scene.push(nudge(weights), 1)
    assert failures == {scene.admins[0].url: "the disk of this node is full"}
    assert scene.admins[0].weights is before


def test_an_engine_on_a_node_without_a_copy_is_left_out(scene: Scene) -> None:
    scene.admins.append(LoadingAdmin(node=7))
    failures = scene.push(make_weights(0), 0)
    assert failures == {scene.admins[1].url: "its node holds no copy"}


def test_an_update_that_broke_is_no_base(scene: Scene) -> None:
    weights = make_weights(0)
    scene.push(weights, 0)
    deadline = time.monotonic() + 60
    scene.transport.begin(scene.admins, 1, deadline)

    def break_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from make_weights(3).items()
        raise RuntimeError("a rank failed")

    with pytest.raises(RuntimeError, match="a rank failed"):
        scene.transport.send(break_off(), scene.admins, 1, bucket_bytes=64, deadline=deadline)
    weights = nudge(weights)
    scene.push(weights, 1)
    scene.require(weights)
    assert scene.lines == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "../model-00000.safetensors"),
        ("name", "/etc/passwd"),
        ("name", "model.py"),
        ("size", -1),
        ("digest", "x"),
        ("encoding", "pickle"),
        ("width", 0),
    ],
)
def test_a_manifest_that_names_other_files_is_refused(
    scene: Scene, key: str, value: object
) -> None:
    scene.push(make_weights(0), 0)
    push = next(iter((scene.folder / "sync").glob("push-*")))
    manifest = json.loads((push / MANIFEST).read_bytes())
    manifest["files"][0][key] = value
    (push / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BrokenDelta, match=MANIFEST):
        read_manifest(push)


def test_a_manifest_with_a_file_twice_or_changes_without_a_base_is_refused(scene: Scene) -> None:
    weights = make_weights(0)
    scene.push(weights, 0)
    scene.push(nudge(weights), 1)
    push = next(iter((scene.folder / "sync").glob("push-*")))
    manifest = json.loads((push / MANIFEST).read_bytes())
    without_base = {**manifest, "base": None}
    (push / MANIFEST).write_text(json.dumps(without_base))
    with pytest.raises(BrokenDelta, match="without a base"):
        read_manifest(push)
    manifest["files"].append(manifest["files"][0])
    (push / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BrokenDelta, match="twice"):
        read_manifest(push)


def test_digest_of_nothing_is_that_of_xxh3() -> None:
    assert digest(np.zeros(0, dtype=np.uint8)) == "99aa06d3014798d86001c324468d497f"
