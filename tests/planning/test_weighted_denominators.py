"""The loss is divided by the weights of the groups, so that weights do not enlarge a step."""

from typing import Any

import msgspec
import pytest
import torch

from megatron_rl.config.algorithms import (
    AlgoSettings,
    CispoSettings,
    EspoSettings,
    GrpoSettings,
    GspoSettings,
)
from megatron_rl.config.schema import CreditSettings, ParallelSettings, TrainSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.step_plan import Denominators, ExtraRollout, StepPlan
from megatron_rl.credit.assign import Credit
from megatron_rl.losses import ResponseTokens, open_loss
from megatron_rl.planning.step_planner import StepPlanner
from tests.losses.shapes import shape_of
from tests.support.groups import group

ALGORITHMS = [GrpoSettings(), GspoSettings(), EspoSettings(min_clip=0.2), CispoSettings()]


def plan_of(
    groups: list[Group], *, steps: int = 1, algo: AlgoSettings | None = None, **settings: Any
) -> StepPlan:
    credit_settings = CreditSettings(**settings)  # type: ignore[arg-type]
    credit = Credit(algo or GrpoSettings(), credit_settings).assign(groups)
    train = TrainSettings(total_steps=1, optimizer_steps_per_batch=steps)
    planner = StepPlanner(train, ParallelSettings(), dp_size=1, seed=0)
    return planner.plan(
        1,
        credit.rollouts,
        credit.advantages,
        credit.extra_rollouts,
        credit.denominator_only,
        weights=credit.weights,
    )


def denominators_of(*groups: Group, **settings: Any) -> Denominators:
    (step,) = plan_of(list(groups), **settings).optimizer_steps
    return step.denominators


def test_denominators_sum_the_weights_of_groups() -> None:
    heavy = group(1.0, 0.0, name="a", num_generated=[10, 20], weight=2.5)
    light = group(1.0, 0.0, 0.0, name="b", num_generated=[1, 2, 3])
    denominators = denominators_of(heavy, light)
    assert denominators == Denominators(sequences=2 * 2.5 + 3, tokens=30 * 2.5 + 6)


def test_denominators_without_weights_are_counts() -> None:
    groups = [group(1.0, 0.0, name="a"), group(1.0, 0.0, 0.0, name="b")]
    assert denominators_of(*groups) == Denominators(sequences=5, tokens=20)


def test_kept_groups_count_with_their_weight() -> None:
    kept_group = group(1.0, 1.0, name="c", num_generated=[7, 8], weight=0.5)
    denominators = denominators_of(group(1.0, 0.0, name="a"), kept_group, all_correct="keep")
    assert denominators == Denominators(sequences=2 + 2 * 0.5, tokens=8 + 15 * 0.5)


def test_zero_variance_groups_alone_count_with_their_weight() -> None:
    groups = [
        group(1.0, 1.0, name="c", num_generated=[7, 8], weight=0.5),
        group(0.0, 0.0, name="i", num_generated=[1, 2], weight=3.0),
    ]
    denominators = denominators_of(*groups, all_correct="zvp", all_incorrect="zvp")
    assert denominators == Denominators(sequences=2 * 0.5 + 2 * 3.0, tokens=15 * 0.5 + 3 * 3.0)


def test_each_optimizer_step_sums_its_own_weights() -> None:
    groups = [group(1.0, 0.0, name=str(i), weight=1.0 + i) for i in range(5)]
    plan = plan_of(groups, steps=3)
    weight_by_prompt = {str(i): 1.0 + i for i in range(5)}
    for step in plan.optimizer_steps:
        indices = [i for rank in step.micro_batches for batch in rank for i in batch]
        weights = [weight_by_prompt[plan.rollouts[i].prompt_id] for i in indices]
        assert step.denominators == Denominators(sequences=sum(weights), tokens=4 * sum(weights))


def response_of(plan: StepPlan, lengths: list[int], dtype: torch.dtype) -> ResponseTokens:
    """The tokens of all rollouts, with old log-probabilities of a dtype."""
    old = torch.cat([torch.linspace(-2.0, -0.5, n) for n in lengths]).to(dtype)
    return ResponseTokens(
        old_logprobs=old,
        old_entropies=torch.cat([torch.linspace(0.1, 2.0, n) for n in lengths]),
        rollout_logprobs=old,
        advantages=torch.tensor(plan.advantages).repeat_interleave(torch.tensor(lengths)),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
    )


def loss_and_gradients(
    algo: AlgoSettings, plan: StepPlan, dtype: torch.dtype
) -> tuple[float, dict[str, float]]:
    """Return the loss of a plan whose ratios are 1, and its gradients.

    A gradient is taken for one shift of all log-probabilities of a response. Responses of prompts
    with the same first letter share it.
    """
    names = [f"{ref.prompt_id[0]}/{ref.sample_index}" for ref in plan.rollouts]
    lengths = [ref.num_trainable for ref in plan.rollouts]
    shifts = {name: torch.zeros(1, requires_grad=True) for name in names}
    pairs = zip(names, lengths, strict=True)
    shift = torch.cat([shifts[name].expand(n) for name, n in pairs]).to(dtype)
    response = response_of(plan, lengths, dtype)
    objective = open_loss(algo, shape_of(48)).prepare(response)
    loss = objective(response.old_logprobs + shift, plan.optimizer_steps[0].denominators).loss
    loss.backward()
    return loss.item(), {name: float(shift.grad or 0.0) for name, shift in shifts.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_weighted_groups_by_hand(dtype: torch.dtype) -> None:
    """The gradient of GSPO's loss by a response is -w A / Σ w.

    Group a has the weight 3 and three responses, two of them correct: A = 1/3, 1/3, -2/3
    without normalisation. Group b has the weight 1 and two responses: A = 1/2, -1/2. So
    Σ w = 3 · 3 + 2 · 1 = 11.
    """
    groups = [
        group(1.0, 1.0, 0.0, name="a", num_generated=[4, 3, 5], weight=3.0),
        group(1.0, 0.0, name="b", num_generated=[2, 6]),
    ]
    algo = GspoSettings(normalize_std=False)
    _, gradients = loss_and_gradients(algo, plan_of(groups, algo=algo), dtype)
    by_hand = {"a/0": -1 / 11, "a/1": -1 / 11, "a/2": 2 / 11, "b/0": -1 / 22, "b/1": 1 / 22}
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    assert gradients == pytest.approx(by_hand, rel=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("algo", ALGORITHMS, ids=lambda algo: algo.name)
def test_a_group_of_weight_two_counts_like_two_groups(
    algo: AlgoSettings, dtype: torch.dtype
) -> None:
    scores = (1.0, 0.0, 0.0)
    lengths = [3, 5, 2]
    other = group(1.0, 0.0, name="b", num_generated=[4, 1])
    twice = [group(*scores, name=f"a{i}", num_generated=lengths) for i in range(2)]
    weighted_group = group(*scores, name="a", num_generated=lengths, weight=2.0)
    loss, gradients = loss_and_gradients(algo, plan_of([*twice, other]), dtype)
    weighted_loss, weighted_gradients = loss_and_gradients(
        algo, plan_of([weighted_group, other]), dtype
    )
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    assert weighted_loss == pytest.approx(loss, abs=tolerance)
    assert weighted_gradients == pytest.approx(gradients, rel=tolerance)
    assert min(map(abs, gradients.values())) > 0.01


def test_only_a_plan_with_a_weight_other_than_one_holds_weights() -> None:
    groups = [group(1.0, 0.0, name="a"), group(1.0, 0.0, name="b")]
    assert plan_of(groups).weights == ()
    heavy_groups = [group(1.0, 0.0, name="a", weight=2.0), group(1.0, 0.0, name="b", weight=2.0)]
    assert plan_of(heavy_groups).weights == (2.0,) * 4


def test_rollouts_of_weight_zero_are_left_out() -> None:
    rollouts = group(1.0, 0.0, name="a").rollouts
    planner = StepPlanner(TrainSettings(total_steps=1), ParallelSettings(), dp_size=1, seed=0)
    plan = planner.plan(1, rollouts, [1.0, -1.0], weights=[0.0, 0.5])
    assert plan.rollouts == rollouts[1:]


def test_kept_rollouts_without_a_trainable_token_do_not_count() -> None:
    trainable, other = group(1.0, 1.0, name="c", num_generated=[7, 8]).rollouts
    untrainable = msgspec.structs.replace(other, num_trainable=0)
    train = TrainSettings(total_steps=1, optimizer_steps_per_batch=1)
    planner = StepPlanner(train, ParallelSettings(), dp_size=1, seed=0)
    (step,) = planner.plan(
        1,
        group(1.0, 0.0, name="a").rollouts,
        [1.0, -1.0],
        denominator_only=[ExtraRollout(trainable, 0.0), ExtraRollout(untrainable, 0.0)],
    ).optimizer_steps
    assert step.denominators == Denominators(sequences=3, tokens=8 + 7)
