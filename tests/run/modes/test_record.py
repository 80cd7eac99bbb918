"""mode=rollout_only: batches that are recorded, also if a collector ends before."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.contracts.commands import Record
from megatron_rl.contracts.group import Group
from megatron_rl.records.progress import Progress
from megatron_rl.rollouts.recording.format import batch_directory
from megatron_rl.rollouts.recording.reader import check_batch
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.wire.store import RolloutStore
from megatron_rl.run.features.observer import Observers
from megatron_rl.run.modes.record import RecordingLeader, record_rollouts
from megatron_rl.training import batch_recording
from megatron_rl.training.worker import LostRollouts
from tests.support.groups import group
from tests.support.recordings import read_rollouts
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import assert_equal, make_rollout

JOB: Any = SimpleNamespace(node=0, local_rank=0, control_group=None)


def stored_group(store: RolloutStore, name: str) -> Group:
    rollout = make_rollout(4, 4)
    (location,) = store.put(name, [rollout])
    refs = (make_ref(rollout, location),)
    return msgspec.structs.replace(group(1.0, name=rollout.prompt_id), group_id=name, rollouts=refs)


def test_a_batch_whose_collector_has_ended_is_not_written(tmp_path: Path) -> None:
    store = RolloutStore(0)
    groups = (stored_group(store, "a"), stored_group(store, "b"))
    command = Record(str(tmp_path / "batch"), groups)
    assert record_rollouts(command, JOB) == ["node-0-00000"]
    store.release(["b"])
    outcome = record_rollouts(Record(str(tmp_path / "other"), groups), JOB)
    assert outcome == LostRollouts(("g7/3",))
    assert not (tmp_path / "other").exists()


def test_a_collector_that_ends_while_a_batch_is_written_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RolloutStore(0)
    groups = (stored_group(store, "a"), stored_group(store, "b"))
    write_parts = batch_recording.write_parts

    def release_and_write(*arguments: Any) -> list[str]:
        store.release(["a", "b"])
        return write_parts(*arguments)

    monkeypatch.setattr(batch_recording, "write_parts", release_and_write)
    assert record_rollouts(Record(str(tmp_path), groups), JOB) == ["node-0-00000"]


@pytest.mark.parametrize("num_losses", [0, 1, 2])
def test_lost_groups_are_sampled_again_and_recorded(tmp_path: Path, num_losses: int) -> None:
    """A collector may end again while they are sampled."""
    store = RolloutStore(0)
    parts = Parts(store)

    def run(command: Record) -> list[str] | LostRollouts:
        if len(parts.samplings) <= num_losses:
            store.release([command.groups[0].group_id])
        return record_rollouts(command, JOB)

    values = record_step(tmp_path, parts, run)
    assert parts.samplings == [(), *[("g7/3",)] * num_losses]
    directory = batch_directory(tmp_path / "recorded", 1)
    check_batch(directory)
    (rollout,) = read_rollouts(directory)
    assert_equal(rollout, make_rollout(4, 4))
    assert values["rollout/tokens"] == 4.0 * (num_losses + 1)


class Parts:
    """Samples one group, and the same again with further tokens. samplings: what was asked for."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store
        self.samplings: list[tuple[str, ...]] = []

    def sample(self, step: int) -> RolloutBatch:
        self.samplings.append(())
        group = stored_group(self._store, f"step-{step}")
        return RolloutBatch((group,), 4, delivered_ids=(group.group_id,))

    def sample_again(
        self, step: int, batch: RolloutBatch, rollout_ids: tuple[str, ...]
    ) -> RolloutBatch:
        new_batch = self.sample(step)
        self.samplings[-1] = rollout_ids
        return RolloutBatch(new_batch.groups, batch.generated_tokens + 4)


def record_step(tmp_path: Path, parts: Parts, run: Callable[[Record], Any]) -> dict[str, float]:
    """Record step 1; returns its metrics."""
    credit = SimpleNamespace(assign=lambda groups: SimpleNamespace(metrics=dict))
    unused: dict[str, Any] = dict.fromkeys(field.name for field in fields(RecordingLeader))
    stand_ins: dict[str, Any] = {
        "parts": SimpleNamespace(rollouts=parts, credit=credit),
        "observers": Observers(),
        "records": SimpleNamespace(
            directory=SimpleNamespace(path=tmp_path), progress=Progress(1, is_enabled=False)
        ),
        "dispatcher": SimpleNamespace(run=run),
        "sampling": SimpleNamespace(release=lambda batch: None),
    }
    values: dict[str, float] = {}
    RecordingLeader(**unused | stand_ins).train_step(1, values)
    return values
