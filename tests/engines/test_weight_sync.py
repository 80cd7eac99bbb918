"""Versions of weights, audits, and the error when an engine holds other weights."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import SyncSettings
from megatron_rl.contracts.commands import Sync
from megatron_rl.engines.weight_sync import FollowerSync, WeightSync
from sglang_bridge.engine import Engine
from sglang_bridge.errors import WeightMismatch
from sglang_bridge.weights.expectation import WeightExpectation

WEIGHTS = {
    "model.norm.weight": torch.arange(8.0),
    "model.layers.0.self_attn.o_proj.weight": torch.eye(4),
}
NORM = "model.norm.weight"
Checksums = dict[str, str]
Change = Callable[[Checksums], Checksums]


class FakeAdmin:
    """An engine that holds the weights it received, after `change`."""

    def __init__(self, change: Change, *, device: str = "cpu") -> None:
        self.engine = Engine(url="http://127.0.0.1:1")
        self.url = self.engine.url
        self.sent_checksums: Checksums = {}
        self._change = change
        self._device = device

    def server_info(self) -> dict[str, Any]:
        return {"device": self._device}

    def checksums(self) -> list[Checksums]:
        return [self._change(self.sent_checksums)]


class FakeUpdater:
    """Accepts every push and remembers its version and names."""

    def __init__(self, admin: FakeAdmin) -> None:
        self.admins = [admin]
        self.pushes: list[tuple[int, list[str]]] = []
        self.compares_values: list[bool] = []  # of each audit

    def push(self, named_tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        self.pushes.append((version, [name for name, _ in named_tensors]))


def no_change(checksums: Checksums) -> Checksums:
    return checksums


def with_other_norm(checksums: Checksums) -> Checksums:
    return checksums | {NORM: "0" * 16}


def without_norm(checksums: Checksums) -> Checksums:
    return {name: value for name, value in checksums.items() if name != NORM}


def with_extra_bias(checksums: Checksums) -> Checksums:
    return checksums | {"model.layers.0.bias": "1" * 16}


def make_sync(
    change: Change = no_change, *, device: str = "cpu", audit_every: int = 3
) -> tuple[WeightSync, FakeUpdater]:
    updater = FakeUpdater(FakeAdmin(change, device=device))

    def make_expectation(*, compares_values: bool) -> WeightExpectation:
        updater.compares_values.append(compares_values)
        complete = WeightExpectation(dtype=torch.float32, num_experts=2)
        for name, tensor in WEIGHTS.items():
            complete.add(name, tensor)
        for admin in updater.admins:
            admin.sent_checksums = complete.checksums()
        return WeightExpectation(
            dtype=torch.float32, num_experts=2, compares_values=compares_values
        )

    settings = SyncSettings(audit_every=audit_every)
    fake_updater: Any = updater
    return WeightSync(fake_updater, settings, make_expectation=make_expectation), updater


def send(sync: WeightSync) -> dict[str, float]:
    return sync.send(sync.next_command(), iter(WEIGHTS.items()))


def test_versions_count_up_and_the_first_sync_is_audited() -> None:
    sync, updater = make_sync(audit_every=3)
    is_audited = ["sync/audit_mismatches" in send(sync) for _ in range(7)]
    assert is_audited == [True, False, False, True, False, False, True]
    assert updater.pushes == [(version, list(WEIGHTS)) for version in range(7)]


@pytest.mark.parametrize(
    ("audit_every", "audits"), [(0, [True, False, False]), (1, [True, True, True])]
)
def test_the_first_sync_is_audited_for_every_interval(audit_every: int, audits: list[bool]) -> None:
    sync, _ = make_sync(audit_every=audit_every)
    assert [sync.next_command().audit for _ in range(3)] == audits


def test_an_audit_counts_the_compared_parameters() -> None:
    sync, _ = make_sync()
    assert send(sync) == {
        "sync/version": 0.0,
        "sync/audit_mismatches": 0.0,
        "sync/audit_compared": 2.0,
    }


def test_an_audit_counts_the_parameters_of_all_engines() -> None:
    sync, updater = make_sync()
    updater.admins.append(FakeAdmin(no_change))
    assert sync.audit_obstacle == ""
    assert send(sync)["sync/audit_compared"] == 4.0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (with_other_norm, NORM),
        (without_norm, NORM),
        (with_extra_bias, "model.layers.0.bias"),
    ],
    ids=["other value", "missing in the engine", "never sent"],
)
def test_a_difference_is_an_error_that_names_the_tensor(change: Change, name: str) -> None:
    sync, updater = make_sync(change)
    with pytest.raises(WeightMismatch, match=name) as failure:
        send(sync)
    assert failure.value.exit_code == 6
    assert updater.pushes == [(0, list(WEIGHTS))]


def test_a_difference_names_the_version() -> None:
    sync, _ = make_sync(with_other_norm, audit_every=2)
    for _ in range(2):
        sync.next_command()
    with pytest.raises(WeightMismatch) as failure:
        send(sync)
    assert failure.value.version == 2


def test_engines_that_cannot_be_audited_by_value_are_compared_by_name_once() -> None:
    sync, updater = make_sync(device="cuda", audit_every=1)
    assert send(sync) == {"sync/version": 0.0}
    assert "device=cuda" in sync.audit_obstacle
    assert send(sync) == {"sync/version": 1.0}
    assert len(updater.pushes) == 2


def test_names_are_audited_again_where_values_cannot_be_compared() -> None:
    sync, updater = make_sync(device="cuda", audit_every=1)
    send(sync)
    updater.admins.append(FakeAdmin(without_norm, device="cuda"))
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight \(the engine has no such"):
        send(sync)


def test_values_are_not_hashed_where_they_cannot_be_compared() -> None:
    sync, updater = make_sync(device="cuda", audit_every=1)
    for _ in range(2):
        send(sync)
    sharded_sync, sharded_updater = make_sync()
    sharded_updater.admins[0].engine = Engine(url="http://127.0.0.1:1", tp=2)
    send(sharded_sync)
    assert "tp=2" in sharded_sync.audit_obstacle
    assert updater.compares_values == [True, False]
    assert sharded_updater.compares_values == [False]


def test_a_missing_name_is_an_error_without_an_audit_by_value() -> None:
    sync, _ = make_sync(without_norm, device="cuda")
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight \(the engine has no such"):
        send(sync)


def test_every_engine_is_audited() -> None:
    sync, updater = make_sync()
    updater.admins.append(FakeAdmin(with_other_norm))
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight .*0000"):
        send(sync)


def test_a_resumed_run_continues_the_versions() -> None:
    for version, synced, next_version in ((None, False, 0), (4, True, 4), (4, False, 5)):
        sync, _ = make_sync()
        sync.resume_from(version, synced=synced)
        assert sync.next_command().version == next_version


def test_a_follower_consumes_the_export_and_sends_nothing() -> None:
    names = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS.items():
            names.append(name)
            yield name, tensor

    assert FollowerSync().send(Sync(version=0), export()) == {}
    assert names == list(WEIGHTS)


def test_a_follower_keeps_no_tensor() -> None:
    references: list[weakref.ref[torch.Tensor]] = []
    num_alive: list[int] = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for _ in range(3):
            tensor = torch.ones(4)
            references.append(weakref.ref(tensor))
            yield "weight", tensor
            del tensor
            num_alive.append(sum(reference() is not None for reference in references))

    FollowerSync().send(Sync(version=0, audit=True), export())
    assert num_alive == [0, 0, 0]
