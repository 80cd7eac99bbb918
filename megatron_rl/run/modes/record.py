"""mode=rollout_only: rollouts are recorded and nothing is trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_rl.contracts.commands import Record
from megatron_rl.credit.account import account_of_recording
from megatron_rl.mcore.job import Job
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.recording.format import BatchRecord, batch_directory
from megatron_rl.rollouts.recording.writer import write_batch
from megatron_rl.run.loop.leader import Leader
from megatron_rl.training.batch_recording import groups_on_node, record_groups


@dataclass(frozen=True)
class RecordingLeader(Leader):
    """Samples and records; the weights stay those that the run began with."""

    def train_step(self, step: int, values: dict[str, float]) -> None:
        """Sample and record. Adds the metrics of the step to `values`."""
        watch = Stopwatch()
        with watch.section("rollout"):
            batch = self.parts.rollouts.sample(step)
        with watch.section("account"):
            values |= batch.metrics() | self.parts.credit.assign(batch.groups).metrics()
            values |= account_of_recording(
                batch.all_groups,
                generated_tokens=batch.generated_tokens,
                unused_tokens=batch.unused_tokens,
            )
            self.observers.after_quiet(batch.generated_tokens, values)
        directory = batch_directory(self.records.directory.path / "recorded", step)
        with watch.section("record"), self.records.progress.task(f"writing {directory}"):
            names = self.dispatcher.run(Record(str(directory), batch.all_groups))
            record = BatchRecord(
                step=step,
                groups=len(batch.all_groups),
                num_stopped=len(batch.stopped_groups),
                num_surplus=len(batch.surplus_groups),
                generated_tokens=batch.generated_tokens,
                engines_left_out=batch.engines_left_out,
                unused_tokens=dict(batch.unused_tokens),
                parts=tuple(names),
            )
            write_batch(directory, record)
        self.sampling.release(batch)
        values |= watch.values()
        self.records.progress.log_step(step, values)
        self.observers.after_step(values)


def record_rollouts(command: Record, job: Job) -> list[str]:
    """Write the rollouts that are stored on this node, by group (a collective).

    Local rank 0 of each node writes. Returns the names of the parts of all nodes.
    """
    return record_groups(
        Path(command.path),
        groups_on_node(command.groups, job.node),
        job.node,
        is_writer=job.local_rank == 0,
        group=job.control_group,
    )
