"""A real engine that loads copies rebuilt from changes, compared with complete files."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_bridge.deltas.codec import BrokenDelta
from sglang_bridge.deltas.transport import CopyReply, DeltaTransport
from sglang_bridge.deltas.weight_copy import WeightCopy
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.weights.audit import audit_engine
from sglang_bridge.weights.disk import DiskTransport
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.fused_layout import update_unit
from tests.sglang_bridge.tiny_model import EXPERTS, write_tiny_model
from tests.support.engines import running_engine

pytestmark = [pytest.mark.nightly, pytest.mark.engine]

Weights = dict[str, torch.Tensor]
BUCKET_BYTES = 128 * 1024


class LocalCopies:
    """The copy of the only node, in this process."""

    def __init__(self, folder: Path) -> None:
        self.nodes = (0,)
        self.copy = WeightCopy(folder)

    def take(self, push: Path, nodes: Sequence[int]) -> Mapping[int, CopyReply]:
        try:
            return {0: CopyReply(path=str(self.copy.take(push)))}
        except BrokenDelta as error:
            return {0: CopyReply(reason=str(error))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "a", seed=0)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedEngine]:
    with running_engine(model, tmp_path_factory.mktemp("logs")) as running:
        yield running


class Scene:
    """An engine, and both transports to it."""

    def __init__(self, engine: ManagedEngine, model: Path, folder: Path) -> None:
        self.folder = folder
        self.admin = engine.admin()
        self.lines: list[str] = []
        (folder / "copy").mkdir()
        self.copies = LocalCopies(folder / "copy")
        self.deltas = DeltaTransport(
            directory=folder / "deltas",
            scratch=folder / "scratch",
            config_from=model,
            nodes=self.copies.nodes,
            rebuild=self.copies.take,
            timeout_seconds=60,
            log=self.lines.append,
        )
        self.whole = DiskTransport(
            directory=folder / "whole", config_from=model, timeout_seconds=60
        )

    def send(self, transport: DeltaTransport | DiskTransport, weights: Weights) -> dict[str, str]:
        """Send weights to the engine; returns the checksums of its parameters."""
        admins = [self.admin]
        deadline = time.monotonic() + 60
        self.admin.pause()
        assert transport.connect(admins) == {}
        assert transport.begin(admins, 1, deadline) == {}
        transport.send(
            iter(weights.items()), admins, 1, bucket_bytes=BUCKET_BYTES, deadline=deadline
        )
        assert transport.end(admins, 1, deadline) == {}
        self.admin.flush_cache()
        self.admin.resume()
        (checksums,) = self.admin.checksums()
        return checksums


@pytest.fixture
def scene(engine: ManagedEngine, model: Path, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(engine, model, tmp_path)
    yield scene
    scene.deltas.close()
    scene.whole.close()


@pytest.fixture
def start(model: Path) -> Weights:
    weights = load_file(model / "model.safetensors")
    # Tensors that an engine fuses follow one another
    return {name: weights[name] for name in sorted(weights, key=update_unit)}


def train(weights: Weights, step: int) -> Weights:
    """The weights after a small change of one value in a hundred."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: tensor + 1e-3 * (torch.rand(tensor.shape, generator=generator) < 0.01)
        for name, tensor in weights.items()
    }


def test_changes_give_the_checksums_of_complete_files(scene: Scene, start: Weights) -> None:
    history = [start]
    checksums = [scene.send(scene.deltas, start)]
    for step in range(3):
        history.append(train(history[-1], step))
        checksums.append(scene.send(scene.deltas, history[-1]))
        assert scene.deltas.measure()["sync/delta/share"] < 0.5
    assert scene.lines == []
    assert len({tuple(sorted(sums.items())) for sums in checksums}) == 4
    expectation = WeightExpectation(dtype=torch.float32, num_experts=EXPERTS)
    for name, tensor in history[-1].items():
        expectation.add(name, tensor)
    audit_engine(scene.admin, expectation).raise_on_mismatch(1)
    # Complete files of other weights come between, so that the engine must load again.
    assert scene.send(scene.whole, start) == checksums[0]
    assert scene.send(scene.whole, history[-1]) == checksums[-1]


def test_a_node_that_lost_its_copy_gets_complete_weights(scene: Scene, start: Weights) -> None:
    scene.send(scene.deltas, start)
    other = scene.folder / "other"
    other.mkdir()
    scene.copies.copy = WeightCopy(other)
    weights = train(start, 9)
    checksums = scene.send(scene.deltas, weights)
    assert "node 0 gets complete weights" in scene.lines[-1]
    assert scene.send(scene.whole, start) != checksums
    assert scene.send(scene.whole, weights) == checksums
