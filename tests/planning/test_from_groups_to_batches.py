"""From judged groups to micro-batches every rollout keeps its own tokens, log-probabilities and
advantage.
"""

import itertools

import pytest
import torch

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import ParallelSettings, TrainSettings
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.credit.assign import Credit
from megatron_rl.models.families import read_shape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.training.micro_batches import Batcher
from tests.support.batches import make_batch
from tests.support.float64_steps import Sequence64, advantages_of
from tests.support.judged_batches import judged_groups
from tests.support.policies import COLUMN_ADDITION


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rollout_keeps_its_own(tp: int) -> None:
    shape = read_shape(COLUMN_ADDITION)
    _, rollouts, _ = make_batch(shape, 48)
    groups, by_id = judged_groups(rollouts), {rollout.rollout_id: rollout for rollout in rollouts}
    expected = advantages_of(groups)
    assert len(set(expected.values())) > 20, "advantages that are alike could be exchanged"
    credited = Credit(GrpoSettings(), seed=0).assign(0, groups)
    parallel = ParallelSettings(tp=tp, sequence_parallel=tp > 1)
    settings = TrainSettings(total_steps=1, optimizer_steps_per_batch=2, tokens_per_micro_batch=120)
    plan = StepPlanner(settings, parallel, dp_size=2, seed=0).plan(
        0, credited.rollouts, credited.advantages
    )
    routes = RouteShape(
        moe_layers=shape.moe_layers, num_hidden_layers=4, num_experts=8, topk=shape.topk
    )
    batcher = Batcher(RankView.of(shape.num_layers, parallel), routes, torch.device("cpu"))
    mine = {i: by_id[ref.rollout_id] for i, ref in enumerate(plan.rollouts)}
    trained = []
    for rank in (0, 1):
        for step, batches in zip(
            plan.optimizer_steps, batcher.optimizer_steps(plan, rank, mine), strict=True
        ):
            for indices, batch in zip(step.micro_batches[rank], batches, strict=True):
                assert len(indices) != 1, "micro-batches of one rollout show nothing"
                starts, bounds = (
                    batch.packed.cu_seqlens.tolist(),
                    itertools.pairwise(batch.cu_seqlens.tolist()),
                )
                for index, start, (first, last) in zip(indices, starts, bounds, strict=False):
                    name = plan.rollouts[index].rollout_id
                    own = Sequence64.of(by_id[name])
                    assert batch.targets[first:last].equal(own.targets)
                    assert batch.rows[first:last].equal(start + own.rows)
                    assert batch.packed.input_ids[0, start : start + len(own.inputs)].equal(
                        own.inputs
                    )
                    torch.testing.assert_close(
                        batch.rollout_logprobs[first:last].double(), own.sampled
                    )
                    assert batch.advantages[first:last].tolist() == pytest.approx(
                        [expected[name]] * (last - first)
                    )
                    trained.append(name)
    assert sorted(trained) == sorted(expected)
