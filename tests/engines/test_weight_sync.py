"""Versions, audits and what happens when an engine holds other weights than were sent."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import SyncSettings
from megatron_rl.engines.weight_sync import FollowerSync, WeightSync
from sglang_bridge.engine import Engine
from sglang_bridge.errors import WeightMismatch
from sglang_bridge.weights.expectation import WeightExpectation

WEIGHTS = {
    "model.norm.weight": torch.arange(8.0),
    "model.layers.0.self_attn.o_proj.weight": torch.eye(4),
}
HELD = Callable[[dict[str, str]], dict[str, str]]


class FakeAdmin:
    """An engine that holds what it was sent, changed by `held`."""

    def __init__(self, held: HELD, *, device: str = "cpu") -> None:
        self.engine = Engine(url="http://127.0.0.1:1")
        self.url = self.engine.url
        self._held = held
        self._device = device
        self.expected: dict[str, str] = {}

    def server_info(self) -> dict[str, Any]:
        return {"device": self._device}

    def checksums(self) -> list[dict[str, str]]:
        return [self._held(self.expected)]


class FakeUpdater:
    """Takes every push and remembers it."""

    def __init__(self, admin: FakeAdmin) -> None:
        self.admins = [admin]
        self.pushed: list[tuple[int, list[str]]] = []

    def push(self, named_tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        self.pushed.append((version, [name for name, _ in named_tensors]))


def truth(expected: dict[str, str]) -> dict[str, str]:
    return expected


def make_sync(
    held: HELD = truth, *, device: str = "cpu", audit_every: int = 3
) -> tuple[WeightSync, FakeUpdater]:
    updater = FakeUpdater(FakeAdmin(held, device=device))

    def expect() -> WeightExpectation:
        whole = WeightExpectation(dtype=torch.float32, num_experts=2)
        for name, tensor in WEIGHTS.items():
            whole.add(name, tensor)
        for admin in updater.admins:
            admin.expected = whole.checksums()
        return WeightExpectation(dtype=torch.float32, num_experts=2)

    settings = SyncSettings(audit_every=audit_every)
    return WeightSync(updater, settings, expect=expect), updater  # type: ignore[arg-type]


def send(sync: WeightSync) -> dict[str, float]:
    return sync.send(sync.next_command(), iter(WEIGHTS.items()))


def test_versions_count_up_and_the_first_sync_is_audited() -> None:
    sync, updater = make_sync(audit_every=3)
    audited = ["sync/audit_mismatches" in send(sync) for _ in range(7)]
    assert audited == [True, False, False, True, False, False, True]
    assert updater.pushed == [(version, list(WEIGHTS)) for version in range(7)]


def test_without_further_audits_the_first_sync_is_still_audited() -> None:
    sync, _ = make_sync(audit_every=0)
    assert [sync.next_command().audit for _ in range(4)] == [True, False, False, False]


def test_an_audit_says_how_much_it_compared() -> None:
    sync, _ = make_sync()
    assert send(sync) == {
        "sync/version": 0.0,
        "sync/audit_mismatches": 0.0,
        "sync/audit_compared": 2.0,
    }


@pytest.mark.parametrize(
    ("held", "named"),
    [
        (lambda e: e | {"model.norm.weight": "0" * 16}, "model.norm.weight"),
        (lambda e: {k: v for k, v in e.items() if k != "model.norm.weight"}, "model.norm.weight"),
        (lambda e: e | {"model.layers.0.bias": "1" * 16}, "model.layers.0.bias"),
    ],
    ids=["another value", "the engine lacks it", "nothing was sent for it"],
)
def test_a_difference_ends_the_run_and_names_the_tensor(held: HELD, named: str) -> None:
    sync, updater = make_sync(held)
    with pytest.raises(WeightMismatch, match=named) as caught:
        send(sync)
    assert caught.value.exit_code == 6
    assert updater.pushed == [(0, list(WEIGHTS))]


def test_engines_that_cannot_be_audited_by_value_are_compared_by_name_and_said_so_once() -> None:
    sync, updater = make_sync(device="cuda", audit_every=1)
    assert send(sync) == {"sync/version": 0.0}
    assert "device=cuda" in sync.audit_obstacle
    assert send(sync) == {"sync/version": 1.0} and len(updater.pushed) == 2
    unknown, _ = make_sync(
        lambda e: {k: v for k, v in e.items() if k != "model.norm.weight"}, device="cuda"
    )
    with pytest.raises(
        WeightMismatch, match=r"model\.norm\.weight \(the engine has no such parameter\)"
    ):
        send(unknown)


def test_every_engine_is_audited() -> None:
    sync, updater = make_sync()
    updater.admins.append(FakeAdmin(lambda e: e | {"model.norm.weight": "0" * 16}))
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight \(sent .*, held 0000"):
        send(sync)


def test_a_bystander_exhausts_the_export() -> None:
    seen = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS.items():
            seen.append(name)
            yield name, tensor

    sync, _ = make_sync()
    assert FollowerSync().send(SimpleNamespace(version=0), export()) == {}  # type: ignore[arg-type]
    assert seen == list(WEIGHTS)
    assert sync.next_command().version == 0
