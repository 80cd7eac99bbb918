"""Copies of the weights on nodes, which follow rank 0 through the store of all ranks."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl.engines.node import weight_copies
from megatron_rl.engines.node.node_board import NodeBoard
from megatron_rl.engines.node.weight_copies import RemoteWeightCopies, WeightCopyKeeper
from sglang_bridge.deltas.codec import BrokenDelta
from sglang_bridge.deltas.transport import CopyReply
from sglang_bridge.deltas.weight_copy import WeightCopy


class NotingCopy(WeightCopy):
    """Notes the pushes that it takes. error: raised instead, once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.pushes: list[Path] = []
        self.error: Exception | None = None

    def take(self, push: Path) -> Path:
        self.pushes.append(push)
        error = self.error
        if error is not None:
            self.error = None
            raise error
        return self.folder / push.name


class Scene:
    """Two nodes and rank 0 around one store."""

    def __init__(self, folder: Path) -> None:
        store = dist.HashStore()
        self.lines: list[str] = []
        self.copies = [NotingCopy(folder / str(node)) for node in range(2)]
        self.keepers = [
            WeightCopyKeeper(node, copy, NodeBoard(store)) for node, copy in enumerate(self.copies)
        ]
        self.remote = RemoteWeightCopies(
            (0, 1), NodeBoard(store), timeout_seconds=20, log=self.lines.append
        )
        self.impatient = RemoteWeightCopies(
            (0, 1), NodeBoard(store), timeout_seconds=2, log=self.lines.append
        )


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    for keeper in scene.keepers:
        keeper.close()


def test_each_node_answers_each_order_once(scene: Scene, tmp_path: Path) -> None:
    push = Path("/shared/push-1")
    replies = scene.remote.take(push, scene.remote.nodes)
    assert replies == {
        node: CopyReply(path=str(tmp_path / str(node) / "push-1")) for node in (0, 1)
    }
    time.sleep(0.1)
    assert [copy.pushes for copy in scene.copies] == [[push], [push]]
    # The same push again is another order.
    scene.remote.take(push, [1])
    assert [copy.pushes for copy in scene.copies] == [[push], [push, push]]


def test_a_node_says_why_it_has_no_weights(scene: Scene) -> None:
    scene.copies[0].error = BrokenDelta("push-2/model.change: torn")
    scene.copies[1].error = RuntimeError("unforeseen")
    replies = scene.remote.take(Path("/shared/push-2"), [0, 1])
    assert replies == {
        0: CopyReply(reason="push-2/model.change: torn"),
        1: CopyReply(reason="RuntimeError: unforeseen"),
    }
    assert scene.remote.take(Path("/shared/push-3"), [0])[0].reason == ""


def test_a_silent_node_is_named_after_the_timeout(scene: Scene) -> None:
    scene.keepers[1].close()
    replies = scene.impatient.take(Path("/shared/push-1"), [0, 1])
    assert replies[0].path
    assert "sync.timeout_s=2" in replies[1].reason


def test_a_long_wait_says_what_it_waits_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    reminder = weight_copies.Reminder
    monkeypatch.setattr(weight_copies, "Reminder", lambda: reminder(first_seconds=0.05))
    scene.keepers[1].close()
    scene.impatient.take(Path("/shared/push-1"), [1])
    assert scene.lines[0].startswith("waiting for nodes [1] to rebuild the weights")
