"""Halves of a run: rollouts that are recorded and not trained on, and training on recorded ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.commands import Record
from megatron_rl.contracts.group import Group
from megatron_rl.credit.assign import Credit
from megatron_rl.mcore.job import Job
from megatron_rl.models.route_shape import route_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.records.run_records import RunRecords
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.recording.recorded_rollouts import RecordedRollouts
from megatron_rl.rollouts.recording.writer import BatchRecord, batch_directory, write_batch, write_parts
from megatron_rl.rollouts.store import read_rollout
from megatron_rl.run.leader import Leader, Stages
from megatron_rl.training.collectives import gather_bytes
from megatron_rl.training.dispatcher import Dispatcher


@dataclass
class RecordingLeader(Leader):
    """mode=rollout_only: rank 0's loop without training; the weights stay those that the run began
    with.
    """

    def train_step(self, step: int, values: dict[str, float]) -> None:
        """Roll out and record; adds the step's metrics to `values`."""
        watch = Stopwatch()
        with watch.section("rollout"):
            batch = self.stages.rollouts.draw(step)
        values |= batch.metrics() | self.stages.credit.assign(step, batch.groups).metrics()
        directory = batch_directory(self.records.directory.path / "recorded", step)
        with watch.section("record"):
            parts = self.dispatcher.run(Record(str(directory), batch.drawn))
            record = BatchRecord(
                step=step,
                groups=len(batch.drawn),
                stopped=len(batch.stopped),
                surplus=len(batch.surplus),
                generated_tokens=batch.generated_tokens,
                engines_left_out=batch.engines_left_out,
                parts=tuple(parts),
            )
            write_batch(directory, record)
        self.queue.release(batch.delivered)
        values |= watch.values()
        self.records.progress.step(step, values)

    def evaluate(self, step: int, values: dict[str, float]) -> None:
        """The weights do not change."""

    def save_weights(self, step: int) -> None:
        """They are those of model.path."""


def record_rollouts(command: Record, job: Job) -> list[str]:
    """Every node writes the groups that lie in its memory (a collective).

    Returns the names of all parts.
    """
    names: list[str] = []
    if job.local_rank == 0:
        mine = (
            (index, group)
            for index, group in enumerate(command.groups)
            if _node_of(group) == job.node
        )
        names = write_parts(
            Path(command.path),
            job.node,
            ((i, group, [read_rollout(r) for r in group.rollouts]) for i, group in mine),
        )
    everyones = gather_bytes(msgspec.msgpack.encode(names), job.control_group)
    return [name for data in everyones for name in msgspec.msgpack.decode(data, type=list[str])]


def _node_of(group: Group) -> int:
    return group.rollouts[0].location.node if group.rollouts else 0


def train_only_leader(
    c: Configuration,
    shape: ModelShape,
    job: Job,
    dispatcher: Dispatcher,
    records: RunRecords,
    dp_size: int,
) -> Leader:
    """mode=train_only: rank 0's loop over recorded batches, without engines. Raises `BadRecording`."""
    recorded = RecordedRollouts(
        c.rollout.recording or "",
        node=job.node,
        batches=c.train.total_steps,
        routes=route_shape(shape) if c.train.replay == "rollout" else None,
        vocab_size=shape.vocab_size,
    )
    stages = Stages(
        rollouts=recorded,
        credit=Credit(c.algo, c.credit, seed=c.seed, max_new_tokens=c.rollout.max_new_tokens),
        planner=StepPlanner(c.train, c.parallel, dp_size=dp_size, seed=c.seed),
        evaluation=None,
    )
    return Leader(
        c.train, c.rollout, c.eval, c.sync, c.run, stages, recorded, None, dispatcher, records
    )
