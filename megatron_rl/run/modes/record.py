"""mode=rollout_only: rollouts are recorded and nothing is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.contracts.commands import Record
from megatron_rl.contracts.group import RolloutRef
from megatron_rl.credit.account import account_of_recording
from megatron_rl.mcore.collectives import gather_texts
from megatron_rl.mcore.job import Job
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.recording.format import BatchRecord, batch_directory
from megatron_rl.rollouts.recording.writer import write_batch
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.wire.store import RolloutGone, RolloutReader
from megatron_rl.run.loop.leader import Leader
from megatron_rl.training.batch_recording import groups_on_node, record_groups
from megatron_rl.training.worker import LostRollouts


@dataclass(frozen=True)
class RecordingLeader(Leader):
    """Samples and records; the weights stay those that the run began with."""

    def train_step(self, step: int, values: dict[str, float]) -> None:
        """Sample and record. Adds the metrics of the step to `values`."""
        watch = Stopwatch()
        batch = self._record_batch(step, watch)
        self.observers.after_sampling(batch.all_groups, values)
        with watch.section("account"):
            values |= batch.metrics() | self.parts.credit.assign(batch.groups).metrics()
            values |= account_of_recording(
                batch.all_groups,
                generated_tokens=batch.generated_tokens,
                unused_tokens=batch.unused_tokens,
            )
            self.observers.after_quiet(batch.generated_tokens, values)
        self.sampling.release(batch)
        values |= watch.values()
        self.records.progress.log_step(step, values)
        self.observers.after_step(values)

    def _record_batch(self, step: int, watch: Stopwatch) -> RolloutBatch:
        """Sample a batch and record it.

        Rollouts that are gone when the ranks ask for them are sampled again.
        """
        with watch.section("rollout"):
            batch = self.parts.rollouts.sample(step)
        directory = batch_directory(self.records.directory.path / "recorded", step)
        while True:
            with watch.section("record"):
                names = self._record(directory, batch)
            if not isinstance(names, LostRollouts):
                break
            with watch.section("rollout"):
                batch = self.parts.rollouts.sample_again(step, batch, names.rollout_ids)
        with watch.section("record"):
            write_batch(directory, _describe(step, batch, names))
        return batch

    def _record(self, directory: Path, batch: RolloutBatch) -> list[str] | LostRollouts:
        """Let all nodes write their parts of a batch; returns the names of the parts."""
        with self.records.progress.task(f"writing {directory}"):
            names: list[str] | LostRollouts = self.dispatcher.run(
                Record(str(directory), batch.all_groups)
            )
        return names


def _describe(step: int, batch: RolloutBatch, parts: Sequence[str]) -> BatchRecord:
    """The record of a batch. parts: the names of its files, of all nodes."""
    return BatchRecord(
        step=step,
        groups=len(batch.all_groups),
        num_stopped=len(batch.stopped_groups),
        num_surplus=len(batch.surplus_groups),
        generated_tokens=batch.generated_tokens,
        engines_left_out=batch.engines_left_out,
        unused_tokens=dict(batch.unused_tokens),
        parts=tuple(parts),
    )


def record_rollouts(command: Record, job: Job) -> list[str] | LostRollouts:
    """Write the rollouts that are stored on this node, by group (a collective).

    Local rank 0 of each node writes. Returns the names of the parts of all nodes. Nothing is
    written if rollouts are gone.
    """
    is_writer = job.local_rank == 0
    groups = list(groups_on_node(command.groups, job.node)) if is_writer else []
    refs = [ref for _, group in groups for ref in group.rollouts]
    with contextlib.closing(RolloutReader()) as reader:
        lost_ids = gather_texts(_keep(refs, reader), job.control_group)
        if lost_ids:
            return LostRollouts(tuple(lost_ids))
        return record_groups(
            Path(command.path),
            groups,
            job.node,
            is_writer=is_writer,
            group=job.control_group,
            read=reader.read,
        )


def _keep(refs: Sequence[RolloutRef], reader: RolloutReader) -> list[str]:
    """Keep rollouts readable until the reader is closed. Returns the ids of those that are gone."""
    lost_ids = []
    for ref in refs:
        try:
            reader.keep(ref)
        except RolloutGone:
            lost_ids.append(ref.rollout_id)
    return lost_ids
