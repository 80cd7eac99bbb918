"""Training work of one rank: train a planned step, export the weights, save them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from megatron_rl.config.schema import (
    EngineSettings,
    ModelSettings,
    SyncSettings,
    TrainSettings,
)
from megatron_rl.contracts.commands import GatherSamples
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.losses import PolicyLoss
from megatron_rl.mcore.collectives import gather_bytes
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.mcore.optimizer import DistributedAdam, StepResult
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.weights import OwnedWeights, open_engine_weights, save_hf_weights
from megatron_rl.models.shape import ModelShape
from megatron_rl.records.samples.parts import SamplePart
from megatron_rl.records.samples.sample import SampleKind
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.wire.store import RolloutReader
from megatron_rl.training.batch_recording import BatchRecorder
from megatron_rl.training.exchange.rollout_exchange import exchange_rollouts
from megatron_rl.training.exchange.transfer_plan import Receiver
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import Batcher, MicroBatch
from megatron_rl.training.old_policy import BatchObjective, compute_old_policy
from megatron_rl.training.policy import Policy
from megatron_rl.training.reference_policy import compute_reference_logprobs
from megatron_rl.training.replay.replay_effect import measure_replay
from megatron_rl.training.replay.update_routes import with_update_routes
from megatron_rl.training.samples.gathering import gather_samples
from megatron_rl.training.samples.token_values import TokenValues, merge_extremes
from megatron_rl.training.update import update_policy


@dataclass(frozen=True)
class TrainOutcome:
    """Result of a training step.

    finite: False if there was a NaN or Inf. Then the rest of the step was not applied, and the
    batch was recorded.
    optimizer_steps: number of optimizer steps that were applied.
    metrics: of all ranks.
    seconds: durations on this rank, by metric name.
    extremes: indices in the plan of rollouts with extreme values, if values are kept.
    norms: of the gradients of the applied optimizer steps, before clipping.
    spike: the norm of an optimizer step beyond the limit, None without one. Then the rest of the
    step was not applied, and the batch was recorded.
    weights_finite: False if the weights were checked, and one is NaN or Inf.
    """

    finite: bool
    optimizer_steps: int
    metrics: MetricSums
    seconds: dict[str, float]
    extremes: dict[SampleKind, int] = field(default_factory=dict)
    norms: tuple[float, ...] = ()
    spike: float | None = None
    weights_finite: bool = True


@dataclass(frozen=True)
class LostRollouts:
    """Result of a command that trained or recorded nothing, because rollouts are gone."""

    rollout_ids: tuple[str, ...]


@dataclass
class Worker:
    """One rank's model and optimizer. Each method is a collective that every rank enters.

    receivers: all ranks as receivers of rollouts, in rank order.
    settings: of the training.
    """

    layout: RankLayout
    receivers: Sequence[Receiver]
    shape: ModelShape
    policy: Policy
    optimizer: DistributedAdam
    batcher: Batcher
    model: ModelSettings
    engine: EngineSettings
    settings: TrainSettings
    recorder: BatchRecorder
    sync: SyncSettings = field(default_factory=SyncSettings)
    _token_values: TokenValues | None = field(default=None, init=False, repr=False)
    _weights: OwnedWeights | None = field(default=None, init=False, repr=False)

    def train(
        self,
        plan: StepPlan,
        *,
        keep_values: bool = False,
        max_norm: float | None = None,
        check_weights: bool = False,
        version: int | None = None,
    ) -> TrainOutcome:
        """Run one planned step. The metrics are merged over all ranks, on all ranks.

        keep_values: hold the values of trained tokens for `gather_samples`. max_norm,
        check_weights, version: see the command `Train`.
        Raises on all ranks: `Failure` if one of them replayed routes other than the recorded
        ones, `Failure` if the recorded routes are implausible.
        """
        stopwatch = Stopwatch()
        metrics = MetricSums()
        self._token_values = None
        reader = RolloutReader()
        with stopwatch.section("exchange"):
            steps = self._receive(plan, reader)
        global_metrics: dict[str, float] = {}
        results = self._run(
            plan,
            steps,
            stopwatch,
            metrics,
            global_metrics,
            keep_values=keep_values,
            max_norm=max_norm,
            version=version,
        )
        applied_steps = [result for result in results if result.is_applied]
        global_metrics |= _learning_rate(applied_steps)
        merged_metrics = self._merge(metrics, global_metrics)
        spike = next((result.grad_norm for result in results if result.is_spike), None)
        is_finite = spike is not None or len(applied_steps) == len(plan.optimizer_steps)
        self._require_valid_routes(plan, reader, merged_metrics)
        if not is_finite:
            self.recorder.record_fault("nonfinite", plan, reader.read)
        elif spike is not None:
            self.recorder.record_fault("spike", plan, reader.read)
        else:
            self.recorder.record_regularly(plan, reader.read)
        reader.close()
        extremes = self._merge_extremes() if keep_values else {}
        return TrainOutcome(
            is_finite,
            len(applied_steps),
            merged_metrics,
            stopwatch.seconds,
            extremes,
            norms=tuple(result.grad_norm for result in applied_steps),
            spike=spike,
            weights_finite=not check_weights or self.optimizer.weights_are_finite(),
        )

    def gather_samples(self, command: GatherSamples) -> list[SamplePart]:
        """Send the samples of the last step to rank 0, and free its values (a collective)."""
        values = self._token_values
        self._token_values = None
        layout = self.layout
        # Ranks that share the vocabulary or the sequences hold the same values
        if layout.tp_rank or layout.cp_rank:
            values = None
        return gather_samples(command, values, self.receivers, layout.rank, layout.control_group)

    def set_objective(self, loss: PolicyLoss, logprobs: ResponseLogprobs, lr: float) -> None:
        """Set the loss, the log-probabilities and the peak learning rate of the next steps."""
        self.policy = replace(self.policy, loss=loss, logprobs=logprobs)
        self.optimizer.set_peak_lr(lr)

    def export(self) -> OwnedWeights:
        """Return the weights for the engines under Hugging Face names, as each rank owns them."""
        if self._weights is None:
            self._weights = open_engine_weights(
                self.policy.models,
                self.shape,
                self.layout,
                self.engine,
                bucket_bytes=int(self.sync.bucket_mb * 2**20),
            )
        return self._weights

    def save(self, target: Path) -> None:
        """Write the weights with the start checkpoint's tokenizer and configuration."""
        dtype = torch_dtype(self.model.dtype)
        save_hf_weights(
            self.policy.models,
            self.shape,
            source=Path(self.model.path),
            target=target,
            dtype=dtype,
        )

    def _receive(self, plan: StepPlan, reader: RolloutReader) -> list[list[MicroBatch]]:
        """Fetch this rank's rollouts and pack the micro-batches of each optimizer step.

        A collective. Rollouts that are recorded later stay readable, if their collector ends too.
        """
        rollouts = exchange_rollouts(
            plan,
            self.receivers,
            self.layout.rank,
            self.layout.control_group,
            reader.read,
            keep=reader.keep,
            kept_refs=self.recorder.refs_to_record(plan),
        )
        return self.batcher.optimizer_steps(plan, self.layout.dp_rank, rollouts)

    def _run(
        self,
        plan: StepPlan,
        steps: Sequence[Sequence[MicroBatch]],
        stopwatch: Stopwatch,
        metrics: MetricSums,
        global_metrics: dict[str, float],
        *,
        keep_values: bool,
        max_norm: float | None,
        version: int | None,
    ) -> list[StepResult]:
        """Run the passes and return the results of the optimizer steps, until one is not applied.

        metrics: receives this rank's share.
        global_metrics: receives metrics that are the same on all ranks.
        """
        batches = [batch for step in steps for batch in step]
        if not batches:
            return []
        with stopwatch.section("old_policy"):
            objectives = compute_old_policy(self.policy, batches, metrics, version=version)
        if keep_values:
            self._token_values = TokenValues(plan, self.layout.dp_rank, objectives)
            objectives = self._token_values.observed_objectives()
        steps = with_update_routes(steps, self.policy.replay, self.batcher, stopwatch, metrics)
        every = self.settings.replay_measure_every
        if every and plan.step % every == 0:
            with stopwatch.section("measure_replay"):
                global_metrics |= measure_replay(
                    self.policy,
                    batches,
                    [objective.old_logprobs for objective in objectives],
                    self.shape,
                    self.layout.control_group,
                    metrics,
                )
        reference_logprobs: list[torch.Tensor] = []
        if self.policy.reference is not None:
            with stopwatch.section("reference"):
                reference_logprobs = compute_reference_logprobs(self.policy, steps)
        with stopwatch.section("train"):
            return self._update(plan, steps, objectives, reference_logprobs, metrics, max_norm)

    def _update(
        self,
        plan: StepPlan,
        steps: Sequence[Sequence[MicroBatch]],
        objectives: Sequence[BatchObjective],
        reference_logprobs: Sequence[torch.Tensor],
        metrics: MetricSums,
        max_norm: float | None,
    ) -> list[StepResult]:
        """Run the optimizer steps until one is not applied.

        objectives, reference_logprobs: of all micro-batches.
        """
        results: list[StepResult] = []
        position = 0
        for step, batches in zip(plan.optimizer_steps, steps, strict=True):
            result = update_policy(
                self.policy,
                self.optimizer,
                batches,
                objectives[position : position + len(batches)],
                step.denominators,
                reference_logprobs=reference_logprobs[position : position + len(batches)],
                dp_size=self.layout.dp_size,
                first_step=not results,
                metrics=metrics,
                max_norm=max_norm,
            )
            position += len(batches)
            results.append(result)
            if not result.is_applied:
                break
        self.optimizer.complete_weights()
        return results

    def _merge(self, metrics: MetricSums, global_metrics: dict[str, float]) -> MetricSums:
        """Merge the metrics of all ranks (a collective)."""
        parts = gather_bytes(metrics.to_bytes(), self.layout.control_group)
        result = MetricSums().merge(MetricSums.from_bytes(data) for data in parts)
        for name, value in global_metrics.items():
            result.add_mean(name, value, 1.0)
        return result

    def _merge_extremes(self) -> dict[SampleKind, int]:
        """Find the rollouts with extreme values of all ranks (a collective)."""
        values = self._token_values
        extremes = {} if values is None else values.extremes()
        return merge_extremes(extremes, self.layout.control_group)

    def _require_valid_routes(
        self, plan: StepPlan, reader: RolloutReader, metrics: MetricSums
    ) -> None:
        """Record the batch and raise if routes were not replayed or are implausible.

        A collective. metrics: of all ranks.
        """
        faults = self._gather_replay_faults()
        if faults:
            directory = self.recorder.record_fault("unreplayed", plan, reader.read)
            raise Failure(
                f"step {plan.step}: {faults}. No rank applied that optimizer step. The batch is in "
                f"{directory}",
                ExitCode.SYNC_MISMATCH,
            )
        disagreement = self._route_disagreement(metrics)
        if disagreement:
            directory = self.recorder.record_fault("disagreeing", plan, reader.read)
            raise Failure(
                f"step {plan.step}: {disagreement}. The batch is in {directory}",
                ExitCode.SYNC_MISMATCH,
            )

    def _gather_replay_faults(self) -> str:
        """Describe the replay faults of all ranks, empty if there are none (a collective)."""
        replay = self.policy.replay
        if replay is None:
            return ""
        faults = gather_bytes(replay.take_faults().encode(), self.layout.control_group)
        texts = [f"rank {rank}: {data.decode()}" for rank, data in enumerate(faults) if data]
        return f"routes were not replayed as recorded: {'; '.join(texts)}" if texts else ""

    def _route_disagreement(self, metrics: MetricSums) -> str:
        """Describe why the step's routes are implausible, empty if they are not.

        metrics: of all ranks, so that the result is the same on all ranks.
        """
        share = metrics.values().get("mismatch/route_disagreement", 0.0)
        limit = self.settings.max_route_disagreement
        if share <= limit:
            return ""
        return (
            f"the engines' routes differ from those that the trainer's routers choose in "
            f"{share:.1%} of the tokens' layers (train.max_route_disagreement={limit:g}). Rounding "
            "causes a few percent. These engines hold other weights, or record the routes of other "
            "tokens. Check the kernel that records them (--moe-runner-backend), or train with "
            "train.replay=trainer"
        )


def gather_receivers(layout: RankLayout, moe_rows: tuple[int, ...]) -> list[Receiver]:
    """Return every rank as a receiver of rollouts, in rank order (a collective)."""
    this_rank = Receiver(dp_rank=layout.dp_rank, node=layout.node, moe_rows=moe_rows)
    receivers = gather_bytes(msgspec.msgpack.encode(this_rank), layout.control_group)
    return [msgspec.msgpack.decode(data, type=Receiver) for data in receivers]


def _learning_rate(steps: Sequence[StepResult]) -> dict[str, float]:
    """Return the learning rate of the last optimizer step as a metric, if there is one."""
    return {"train/lr": steps[-1].lr} if steps else {}
