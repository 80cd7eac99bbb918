"""Rollouts keep their tokens, log-probabilities and advantage from group to micro-batch."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import ParallelSettings, TrainSettings
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.credit.assign import Credit
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.training.micro_batches import Batcher, MicroBatch
from tests.support.batches import make_batch
from tests.support.float64_steps import Sequence64, advantages_of, weights_of
from tests.support.judged_batches import judged_groups
from tests.support.policies import COLUMN_ADDITION


def make_batcher(shape: ModelShape, parallel: ParallelSettings) -> Batcher:
    routes = RouteShape(
        moe_layers=shape.moe_layers, num_hidden_layers=4, num_experts=8, topk=shape.topk
    )
    return Batcher(RankView.for_rank(shape.num_layers, parallel), routes, torch.device("cpu"))


def planned_micro_batches(
    plan: StepPlan, batcher: Batcher, rollouts: dict[int, Rollout]
) -> Iterator[tuple[tuple[int, ...], MicroBatch]]:
    """Yield each micro-batch of both ranks, with the indices of its rollouts."""
    for rank in (0, 1):
        packed_steps = batcher.optimizer_steps(plan, rank, rollouts)
        for step, micro_batches in zip(plan.optimizer_steps, packed_steps, strict=True):
            yield from zip(step.micro_batches[rank], micro_batches, strict=True)


def check_rollout(
    micro_batch: MicroBatch, position: int, rollout: Rollout, advantages: dict[str, float]
) -> None:
    """Compare a rollout of a micro-batch, the `position`-th, with the tokens that were sampled."""
    start = micro_batch.inputs.cu_seqlens.tolist()[position]
    bounds = list(itertools.pairwise(micro_batch.cu_seqlens.tolist()))
    first, last = bounds[position]
    expectation = Sequence64.from_rollout(rollout)
    inputs = micro_batch.inputs.input_ids[0, start : start + len(expectation.inputs)]
    assert inputs.equal(expectation.inputs)
    assert micro_batch.targets[first:last].equal(expectation.targets)
    assert micro_batch.rows[first:last].equal(start + expectation.rows)
    logprobs = micro_batch.rollout_logprobs[first:last].double()
    torch.testing.assert_close(logprobs, expectation.rollout_logprobs)
    token_advantages = micro_batch.advantages[first:last].tolist()
    assert token_advantages == pytest.approx([advantages[rollout.rollout_id]] * (last - first))


@pytest.mark.parametrize("tp", [1, 2])
def test_rollouts_keep_their_tokens_and_advantages(tp: int) -> None:
    shape = read_shape(COLUMN_ADDITION)
    _, rollouts, _ = make_batch(shape, 48)
    groups = judged_groups(rollouts)
    rollout_by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    advantage_by_id = advantages_of(groups)
    assert len(set(advantage_by_id.values())) > 20, "equal advantages could be exchanged unnoticed"
    credit = Credit(GrpoSettings()).assign(groups)
    parallel = ParallelSettings(tp=tp)
    train = TrainSettings(total_steps=1, optimizer_steps_per_batch=2, tokens_per_micro_batch=120)
    planner = StepPlanner(train, parallel, dp_size=2, seed=0)
    plan = planner.plan(0, credit.rollouts, credit.advantages, weights=credit.weights)
    rollouts_of_plan = {i: rollout_by_id[ref.rollout_id] for i, ref in enumerate(plan.rollouts)}
    batcher = make_batcher(shape, parallel)
    ids = []
    for indices, micro_batch in planned_micro_batches(plan, batcher, rollouts_of_plan):
        assert len(indices) != 1, "a micro-batch of one rollout cannot mix rollouts up"
        for position, index in enumerate(indices):
            rollout = rollouts_of_plan[index]
            ids.append(rollout.rollout_id)
            check_rollout(micro_batch, position, rollout, advantage_by_id)
    assert sorted(ids) == sorted(advantage_by_id)


def test_rollouts_keep_the_weights_of_their_groups() -> None:
    shape = read_shape(COLUMN_ADDITION)
    _, rollouts, _ = make_batch(shape, 24)
    groups = judged_groups(rollouts)
    rollout_by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    credit = Credit(GrpoSettings()).assign(groups)
    planner = StepPlanner(TrainSettings(total_steps=1), ParallelSettings(), dp_size=2, seed=0)
    plan = planner.plan(0, credit.rollouts, credit.advantages, weights=credit.weights)
    rollouts_of_plan = {i: rollout_by_id[ref.rollout_id] for i, ref in enumerate(plan.rollouts)}
    batcher = make_batcher(shape, ParallelSettings())
    weight_by_id = weights_of(groups)
    assert len(set(weight_by_id.values())) > 2
    for indices, micro_batch in planned_micro_batches(plan, batcher, rollouts_of_plan):
        bounds = itertools.pairwise(micro_batch.cu_seqlens.tolist())
        for index, (first, last) in zip(indices, bounds, strict=True):
            weight = weight_by_id[plan.rollouts[index].rollout_id]
            assert micro_batch.weights[first:last].tolist() == [weight] * (last - first)
