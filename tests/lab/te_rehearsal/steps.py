"""Runs a training step with both specs: old-policy pass, update with replayed routes, AdamW."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import ModelSettings, ParallelSettings, RolloutSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses.grpo import Grpo
from megatron_rl.mcore.layer_spec import Spec
from megatron_rl.mcore.model import build_models, pack_multiple
from megatron_rl.mcore.optimizer import DistributedAdam, StepResult, wrap_data_parallel
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.weights import iterate_hf_weights, load_hf_weights
from megatron_rl.mcore.weights.export import hf_tensors
from megatron_rl.mcore.weights.parameters import placed_parameters
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import Batcher, MicroBatch
from megatron_rl.training.old_policy import compute_old_policy
from megatron_rl.training.policy import Policy
from megatron_rl.training.update import update_policy
from tests.lab.te_rehearsal.models import GRID, Machine
from tests.support.batches import make_batch
from tests.support.policies import ADAM, make_planner, make_view

_ROLLOUTS = 2
_TOKENS = 40  # a rollout has 9 to 40, so that each is a micro-batch
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """The model and the rank of a step. row_multiple: of the rows of a pack."""

    shape: ModelShape
    layout: RankLayout
    grid: ParallelSettings
    row_multiple: int


@dataclass(frozen=True)
class StepOutcome:
    """The results of one optimizer step.

    logprobs: of the old-policy pass, float32 [T]. ratio_deviation: the largest distance of a
    ratio of the update from 1, which is 0 if both passes are one computation. grad_norm: of all
    gradients. gradients, weights: by Hugging Face name, weights after the step.
    """

    logprobs: torch.Tensor
    ratio_deviation: float
    grad_norm: float
    gradients: Tensors
    weights: Tensors


@dataclass(frozen=True)
class Gap:
    """Distances between two steps, each relative to the norm of the second.

    logprobs: the largest absolute one, in nats. gradients: of their norms, where ranks share them.
    """

    logprobs: float
    gradients: float
    movement: float


def run_step(
    machine: Machine, layout: RankLayout, checkpoint: Path, settings: ModelSettings, spec: Spec
) -> StepOutcome:
    """Run the old-policy pass and one update of a model over recorded rollouts.

    FP8 is for `te` alone. Raises RuntimeError if the step was not applied.
    """
    settings = replace(settings, spec=spec, fp8=settings.fp8 if spec == "te" else None)
    with machine.acting_as(spec):
        shape = read_shape(checkpoint)
        chunks = build_models(shape, settings, machine.grid, on_gpu=spec == "te")
        load_hf_weights(chunks, shape, checkpoint)
        place = Place(shape, layout, machine.grid, pack_multiple(settings))
        return _train(_policy(chunks, place), place)


def cast_difference(layout: RankLayout, checkpoint: Path, settings: ModelSettings) -> float:
    """Return the largest change in nats if the casts of weights were made anew after a step.

    Compares the log-probabilities after a step with a new model's, which has the same weights.
    Transformer Engine keeps the casts of weights between the micro-batches of a step.
    """
    shape = read_shape(checkpoint)
    place = Place(shape, layout, GRID, pack_multiple(settings))
    policies = []
    for _ in range(2):
        chunks = build_models(shape, settings, GRID, on_gpu=True)
        load_hf_weights(chunks, shape, checkpoint)
        policies.append(_policy(chunks, place))
    policy, other = policies
    _train(policy, place)
    with torch.no_grad():
        pairs = zip(policy.models[0].parameters(), other.models[0].parameters(), strict=True)
        for weight, copy in pairs:
            copy.copy_(weight)
    batches, _ = _batches(place)
    passes = [compute_old_policy(one, batches, MetricSums()) for one in policies]
    before, after = (torch.cat([o.old_logprobs for o in objectives]) for objectives in passes)
    return float((before - after).abs().max())


def _batches(place: Place) -> tuple[list[MicroBatch], Denominators]:
    layout = place.layout
    refs, rollouts, advantages = make_batch(place.shape, _ROLLOUTS)
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    planner = make_planner(place.grid, layout, tokens_per_micro_batch=_TOKENS)
    plan = planner.plan(0, refs, advantages)
    by_index = {i: by_id[ref.rollout_id] for i, ref in enumerate(plan.rollouts)}
    (batches,) = _batcher(place).optimizer_steps(plan, layout.dp_rank, by_index)
    return batches, plan.optimizer_steps[0].denominators


def _train(policy: Policy, place: Place) -> StepOutcome:
    shape = place.shape
    batches, denominators = _batches(place)
    if len(batches) < 2 and place.layout.dp_size == 1:
        raise RuntimeError("gradients of one micro-batch do not add up")
    objectives = compute_old_policy(policy, batches, MetricSums())
    optimizer = RecordingAdam(policy, place)
    metrics = MetricSums()
    result = update_policy(
        policy,
        optimizer,
        batches,
        objectives,
        denominators,
        dp_size=place.layout.dp_size,
        first_step=True,
        metrics=metrics,
    )
    if not result.is_applied:
        faults = "" if policy.replay is None else policy.replay.take_faults()
        raise RuntimeError(f"the step was not applied: {faults or 'NaN or Inf'}")
    return StepOutcome(
        torch.cat([objective.old_logprobs for objective in objectives]),
        metrics.values()["policy/first_ratio_deviation"],
        result.grad_norm,
        optimizer.gradients,
        {name: tensor.float().clone() for name, tensor in iterate_hf_weights(policy.models, shape)},
    )


class RecordingAdam(DistributedAdam):
    """Records gradients before it applies them.

    Attributes:
    gradients: by Hugging Face name, float32; none where ranks share them.
    """

    def __init__(self, policy: Policy, place: Place) -> None:
        models: Any = policy.models
        super().__init__(models, ADAM, total_steps=10)
        self.gradients: Tensors = {}
        self._policy = policy
        self._place = place

    def step(self, *, loss_is_finite: bool, max_norm: float | None = None) -> StepResult:
        """Record the gradients and apply them."""
        if self._place.layout.world_size == 1:
            self.gradients = _gradients(self._policy, self._place.shape)
        return super().step(loss_is_finite=loss_is_finite, max_norm=max_norm)


def _policy(chunks: list[torch.nn.Module], place: Place) -> Policy:
    models = wrap_data_parallel(chunks)
    rollout = RolloutSettings(max_new_tokens=32)
    logprobs = ResponseLogprobs(
        rollout,
        vocab_size=place.shape.vocab_size,
        tp_group=place.layout.tp_group,
    )
    replay = RouteReplay(models) if place.shape.moe_layers else None
    return Policy(models=models, logprobs=logprobs, loss=Grpo(GrpoSettings()), replay=replay)


def _batcher(place: Place) -> Batcher:
    routes = place.shape.route_shape if place.shape.moe_layers else None
    view = make_view(place.shape, place.grid, place.layout)
    return Batcher(view, routes, place.layout.device, multiple=place.row_multiple)


def _gradients(policy: Policy, shape: ModelShape) -> Tensors:
    gradients: Tensors = {}
    for parameter in placed_parameters(policy.models, shape):
        if not parameter.is_frozen:
            gradient: Any = parameter.weight
            tensors = hf_tensors(parameter, 0, gradient.main_grad.float(), shape, None)
            gradients.update({name: tensor.clone() for name, tensor in tensors})
    return gradients


def gap(step: StepOutcome, reference: StepOutcome, start: Tensors) -> Gap:
    """Measure the distance of a step from another. start: the weights before the step."""
    return Gap(
        logprobs=float((step.logprobs - reference.logprobs).abs().max()),
        gradients=_distance(step.gradients, reference.gradients)
        if step.gradients
        else abs(step.grad_norm / reference.grad_norm - 1),
        movement=_distance(_movement(step, start), _movement(reference, start)),
    )


def _movement(step: StepOutcome, start: Tensors) -> Tensors:
    return {name: step.weights[name] - tensor.float() for name, tensor in start.items()}


def _distance(values: Tensors, reference: Tensors) -> float:
    """The norm of the differences over the norm of the reference, over all tensors."""
    if values.keys() != reference.keys():
        raise ValueError(f"different tensors: {sorted(values.keys() ^ reference.keys())}")
    error = torch.stack([(values[name] - reference[name]).norm() for name in reference]).norm()
    return float(error / torch.stack([value.norm() for value in reference.values()]).norm())
