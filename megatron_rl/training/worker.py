"""What every training rank does when it is told to: train a planned step, export weights, save
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from megatron_rl.config.schema import (
    EngineSettings,
    LoggerSettings,
    ModelSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.losses import PolicyLoss
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.mcore.optimizer import DistributedAdam
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.router_target import ReplayError
from megatron_rl.mcore.weights import every_stage, iterate_hf_weights, rounded, save_hf_weights
from megatron_rl.models.shape import ModelShape
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.files import write_rollouts
from megatron_rl.rollouts.store import read_rollout
from megatron_rl.training.collectives import gather_bytes
from megatron_rl.training.exchange.rollout_exchange import Receiver, exchange_rollouts
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.replay.replay_effect import measure_replay
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import Batcher, MicroBatch
from megatron_rl.training.old_policy import compute_old_policy
from megatron_rl.training.policy import Policy
from megatron_rl.training.update import update_policy
from megatron_rl.training.replay.update_routes import routes_of_update


class RoutesDisagree(Failure):
    """The engines recorded other routes than the trainer's routers choose, too many to be rounding."""

    exit_code = ExitCode.SYNC_MISMATCH


@dataclass(frozen=True)
class TrainOutcome:
    """finite False: a NaN or Inf appeared, the rest of the step was not applied and the batch was
    saved.

    optimizer_steps: how many were applied.
    """

    finite: bool
    optimizer_steps: int
    metrics: MetricSums
    seconds: dict[str, float]


@dataclass
class Worker:
    """One rank's model, optimizer and stages; each method is a collective that every rank enters."""

    layout: RankLayout
    receivers: Sequence[Receiver]
    shape: ModelShape
    policy: Policy
    optimizer: DistributedAdam
    batcher: Batcher
    model: ModelSettings
    engine: EngineSettings
    run: RunSettings
    logger: LoggerSettings
    settings: TrainSettings
    rollouts_directory: Path
    sync: SyncSettings = field(default_factory=SyncSettings)

    def train(self, plan: StepPlan) -> TrainOutcome:
        """Run one planned step. Metrics are merged over all ranks, on all ranks.

        Raises on all of them: `ReplayError` where one replayed other routes than the recorded ones,
        `RoutesDisagree`.
        """
        watch, metrics = Stopwatch(), MetricSums()
        with watch.section("exchange"):
            rollouts = exchange_rollouts(
                plan, self.receivers, self.layout.rank, self.layout.control_group, read_rollout
            )
            steps = self.batcher.optimizer_steps(plan, self.layout.dp_rank, rollouts)
        measured: dict[str, float] = {}
        rates = self._run(plan, steps, watch, metrics, measured)
        stepped, finite = len(rates), len(rates) == len(plan.optimizer_steps)
        everyones = gather_bytes(metrics.to_bytes(), self.layout.control_group)
        merged = MetricSums().merge(MetricSums.from_bytes(data) for data in everyones)
        for name, value in measured.items():
            merged.add_mean(name, value, 1.0)
        if rates:
            merged.add_mean("train/lr", rates[-1], 1.0)
        faults, disagreement = self._everyones_faults(), self._absurd_disagreement(merged)
        why = (
            "unreplayed-"
            if faults
            else "disagreeing-"
            if disagreement
            else ""
            if finite
            else "nonfinite-"
        )
        self._keep_rollouts(plan.step, why, rollouts)
        if faults:
            raise ReplayError(
                f"step {plan.step}: {faults}. That optimizer step was applied on no rank; the batch is in "
                f"{self.rollouts_directory}"
            )
        if disagreement:
            raise RoutesDisagree(
                f"step {plan.step}: {disagreement}; the batch is in {self.rollouts_directory}"
            )
        return TrainOutcome(finite, stepped, merged, watch.seconds)

    def change(self, loss: PolicyLoss, logprobs: ResponseLogprobs, lr: float) -> None:
        """Train with these from the next step on."""
        self.policy = replace(self.policy, loss=loss, logprobs=logprobs)
        self.optimizer.scale_to(lr)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as engines shall hold them, under Hugging Face names, all on rank 0; every
        rank exhausts it.
        """
        weights = iterate_hf_weights(self.policy.models, self.shape, torch_dtype(self.engine.dtype))
        weights = rounded(weights, self.engine.fake_quant)
        return every_stage(weights, self.layout, bucket_bytes=int(self.sync.bucket_mb * 2**20))

    def save(self, target: Path) -> None:
        """Write the weights with the start checkpoint's tokenizer and configuration."""
        dtype = torch_dtype(self.run.save_dtype or self.model.dtype)
        save_hf_weights(
            self.policy.models, self.shape, source=Path(self.model.path), target=target, dtype=dtype
        )

    def _run(
        self,
        plan: StepPlan,
        steps: Sequence[Sequence[MicroBatch]],
        watch: Stopwatch,
        metrics: MetricSums,
        measured: dict[str, float],
    ) -> list[float]:
        """Returns the learning rate of each optimizer step that was applied.

        measured: gets what all ranks know.
        """
        flat = [batch for step in steps for batch in step]
        if not flat:
            return []
        with watch.section("old_policy"):
            objectives = compute_old_policy(self.policy, flat, metrics)
        steps = routes_of_update(steps, self.policy.replay, self.batcher, watch, metrics)
        if (every := self.settings.replay_measure_every) and plan.step % every == 0:
            with watch.section("measure_replay"):
                old, group = (
                    [objective.old_logprobs for objective in objectives],
                    self.layout.control_group,
                )
                measured |= measure_replay(self.policy, flat, old, self.shape, group, metrics)
        position, rates = 0, list[float]()
        with watch.section("train"):
            for planned, batches in zip(plan.optimizer_steps, steps, strict=True):
                result = update_policy(
                    self.policy,
                    self.optimizer,
                    batches,
                    objectives[position : position + len(batches)],
                    planned.denominators,
                    dp_size=self.layout.dp_size,
                    first_step=not rates,
                    metrics=metrics,
                )
                position += len(batches)
                if not result.stepped:
                    break
                rates.append(result.lr)
        return rates

    def _everyones_faults(self) -> str:
        """Where routes were not replayed as recorded, on any rank (a collective); empty where all
        was well.
        """
        replay = self.policy.replay
        if replay is None:
            return ""
        everyones = gather_bytes(replay.take_faults().encode(), self.layout.control_group)
        found = [f"rank {rank}: {data.decode()}" for rank, data in enumerate(everyones) if data]
        return f"routes were not replayed as recorded: {'; '.join(found)}" if found else ""

    def _absurd_disagreement(self, metrics: MetricSums) -> str:
        """What is wrong with the step's routes; empty where they are plausible. The same on all
        ranks.
        """
        share = metrics.values().get("mismatch/route_disagreement", 0.0)
        if share <= self.settings.max_route_disagreement:
            return ""
        return (
            f"the engines' routes are not those that the trainer's routers choose in {share:.1%} of the tokens' layers "
            f"(train.max_route_disagreement={self.settings.max_route_disagreement:g}). Rounding makes a few percent: "
            "these engines hold other weights or record other tokens' routes. Look for what records them "
            "(--moe-runner-backend), or train without: train.replay=trainer"
        )

    def _keep_rollouts(self, step: int, fault: str, rollouts: dict[int, Rollout]) -> None:
        """fault: why they are kept, as the beginning of their directory's name."""
        every = self.logger.save_rollouts_every
        if not fault and not (every and step % every == 0):
            return
        file = self.rollouts_directory / f"{fault}step-{step}" / f"rank-{self.layout.rank}.bin"
        write_rollouts(file, (rollouts[index] for index in sorted(rollouts)))


def gather_receivers(layout: RankLayout, moe_rows: tuple[int, ...]) -> list[Receiver]:
    """Every rank as a receiver of rollouts, in rank order (a collective)."""
    mine = Receiver(dp_rank=layout.dp_rank, node=layout.node, moe_rows=moe_rows)
    everyone = gather_bytes(msgspec.msgpack.encode(mine), layout.control_group)
    return [msgspec.msgpack.decode(data, type=Receiver) for data in everyone]
