"""What a rank that only watches keeps, and what the rank that sends says of several engines."""

import weakref
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.contracts.commands import Sync
from megatron_rl.engines.weight_sync import FollowerSync
from sglang_bridge.errors import WeightMismatch
from tests.engines.test_weight_sync import FakeAdmin, make_sync, send, truth


def test_a_bystander_keeps_none_of_the_tensors() -> None:
    exported: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for _ in range(3):
            tensor = torch.ones(4)
            exported.append(weakref.ref(tensor))
            yield "weight", tensor
            del tensor
            alive.append(sum(kept() is not None for kept in exported))

    FollowerSync().send(Sync(version=0, audit=True), export())
    assert alive == [0, 0, 0]


def test_every_sync_is_audited_when_told_so() -> None:
    sync, _ = make_sync(audit_every=1)
    assert [sync.next_command().audit for _ in range(3)] == [True, True, True]


def test_parameters_of_all_engines_are_counted() -> None:
    sync, updater = make_sync()
    updater.admins.append(FakeAdmin(truth))
    assert sync.audit_obstacle == ""
    assert send(sync)["sync/audit_compared"] == 4.0


def test_a_difference_names_the_version() -> None:
    sync, _ = make_sync(lambda e: e | {"model.norm.weight": "0" * 16}, audit_every=2)
    for _ in range(2):
        sync.next_command()
    with pytest.raises(WeightMismatch) as caught:
        send(sync)
    assert caught.value.version == 2
