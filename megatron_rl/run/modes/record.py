"""mode=rollout_only: rollouts are recorded and nothing is trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_rl.contracts.commands import Record
from megatron_rl.contracts.group import Group
from megatron_rl.mcore.job import Job
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.recording.format import BatchRecord, batch_directory
from megatron_rl.rollouts.recording.writer import write_batch
from megatron_rl.run.leader import Leader
from megatron_rl.training.batch_recording import record_groups


@dataclass
class RecordingLeader(Leader):
    """Samples and records; the weights stay those that the run began with."""

    def train_step(self, step: int, values: dict[str, float]) -> None:
        """Sample and record. Adds the metrics of the step to `values`."""
        watch = Stopwatch()
        with watch.section("rollout"):
            batch = self.parts.rollouts.sample(step)
        values |= batch.metrics() | self.parts.credit.assign(step, batch.groups).metrics()
        directory = batch_directory(self.records.directory.path / "recorded", step)
        with watch.section("record"):
            names = self.dispatcher.run(Record(str(directory), batch.all_groups))
            record = BatchRecord(
                step=step,
                groups=len(batch.all_groups),
                num_stopped=len(batch.stopped_groups),
                num_surplus=len(batch.surplus_groups),
                generated_tokens=batch.generated_tokens,
                engines_left_out=batch.engines_left_out,
                parts=tuple(names),
            )
            write_batch(directory, record)
        self.holder.release(batch.delivered_ids)
        values |= watch.values()
        self.records.progress.log_step(step, values)

    def save_weights(self, step: int) -> None:
        """Do nothing: the weights are those of model.path."""


def record_rollouts(command: Record, job: Job) -> list[str]:
    """Write the groups that are stored on this node (a collective).

    Local rank 0 of each node writes. Returns the names of the parts of all nodes.
    """
    local_groups = (
        (index, group) for index, group in enumerate(command.groups) if _node_of(group) == job.node
    )
    return record_groups(
        Path(command.path),
        local_groups,
        job.node,
        is_writer=job.local_rank == 0,
        group=job.control_group,
    )


def _node_of(group: Group) -> int:
    return group.rollouts[0].location.node if group.rollouts else 0
