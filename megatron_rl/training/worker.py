"""What every training rank does when it is told to: train a planned step, export weights, save them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from megatron_rl.contracts.plan import StepPlan
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.mcore.optimizer import DistributedAdam
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.weights import iterate_hf_weights, save_hf_weights
from megatron_rl.models.qwen3_moe import ModelShape
from megatron_rl.records.metric_sums import MetricSums
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts import codec
from megatron_rl.rollouts.store import read_rollout
from megatron_rl.training.batch import Batcher, MicroBatch
from megatron_rl.training.collectives import gather_bytes
from megatron_rl.training.exchange import Receiver, exchange_rollouts
from megatron_rl.training.old_policy import compute_old_policy
from megatron_rl.training.policy import Policy
from megatron_rl.training.update import update_policy


@dataclass(frozen=True)
class TrainOutcome:
    """finite False: a NaN or Inf appeared, the rest of the step was not applied and the batch was saved.

    optimizer_steps: how many were applied.
    """

    finite: bool
    optimizer_steps: int
    metrics: MetricSums
    seconds: dict[str, float]


@dataclass(frozen=True)
class Worker:
    """One rank's model, optimizer and stages. save_rollouts_every: steps between saved batches, 0: only broken ones."""

    layout: RankLayout
    consumers: Sequence[Receiver]
    model: ModelShape
    policy: Policy
    optimizer: DistributedAdam
    batcher: Batcher
    start_checkpoint: Path
    rollouts_directory: Path
    save_rollouts_every: int = 0

    def train(self, plan: StepPlan) -> TrainOutcome:
        """Run one planned step. Metrics are merged over all ranks, on all ranks."""
        watch, metrics = Stopwatch(), MetricSums()
        with watch.stage("exchange"):
            payloads = exchange_rollouts(
                plan, self.consumers, self.layout.rank, self.layout.control_group, read_rollout
            )
            steps = self.batcher.optimizer_steps(plan, self.layout.dp_rank, payloads)
        stepped = self._run(plan, steps, watch, metrics)
        finite = stepped == len(plan.optimizer_steps)
        if not finite:
            self._save_batch(f"nonfinite-step-{plan.step}", payloads)
        elif self.save_rollouts_every and plan.step % self.save_rollouts_every == 0:
            self._save_batch(f"step-{plan.step}", payloads)
        merged = [MetricSums.from_bytes(data) for data in gather_bytes(metrics.to_bytes(), self.layout.control_group)]
        return TrainOutcome(finite, stepped, MetricSums().merge(merged), watch.seconds)

    def export(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under Hugging Face names; every rank must exhaust it."""
        return iterate_hf_weights(self.policy.models, self.model, dtype)

    def save(self, target: Path) -> None:
        """Write the weights as they are trained, with the start checkpoint's tokenizer and configuration."""
        dtype = next(self.policy.models[0].parameters()).dtype
        save_hf_weights(self.policy.models, self.model, source=self.start_checkpoint, target=target, dtype=dtype)

    def _run(self, plan: StepPlan, steps: Sequence[Sequence[MicroBatch]], watch: Stopwatch, metrics: MetricSums) -> int:
        """Returns how many optimizer steps were applied."""
        flat = [batch for step in steps for batch in step]
        if not flat:
            return 0
        with watch.stage("old_policy"):
            old = compute_old_policy(self.policy, flat, metrics)
        position = stepped = 0
        with watch.stage("train"):
            for planned, batches in zip(plan.optimizer_steps, steps, strict=True):
                result = update_policy(
                    self.policy,
                    self.optimizer,
                    batches,
                    old[position : position + len(batches)],
                    planned.denominators,
                    dp_size=self.layout.dp_size,
                    metrics=metrics,
                )
                position += len(batches)
                if not result.stepped:
                    break
                stepped += 1
        return stepped

    def _save_batch(self, name: str, payloads: dict[int, Rollout]) -> None:
        """Keep what this rank trained on: 8-byte little-endian lengths, each followed by one encoded rollout."""
        directory = self.rollouts_directory / name
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"rank-{self.layout.rank}.bin").open("wb") as file:
            for index in sorted(payloads):
                data = codec.encode(payloads[index])
                file.write(len(data).to_bytes(8, "little") + data)


def gather_receivers(layout: RankLayout, moe_rows: tuple[int, ...]) -> list[Receiver]:
    """Every rank as a receiver of payloads, in rank order (a collective)."""
    mine = Receiver(dp_rank=layout.dp_rank, node=layout.node, moe_rows=moe_rows)
    everyone = gather_bytes(msgspec.msgpack.encode(mine), layout.control_group)
    return [msgspec.msgpack.decode(data, type=Receiver) for data in everyone]
