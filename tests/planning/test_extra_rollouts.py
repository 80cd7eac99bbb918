"""Rollouts of tied and zero-variance groups train beside others, outside of denominators."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.contracts.step_plan import Denominators, ExtraRollout, StepPlan
from tests.planning.test_step_planner import make_plan, make_planner, make_rollout, members_of


def plan_with_extras(
    num_mixed: int,
    num_tied: int = 0,
    num_zero_variance: int = 0,
    num_denominator_only: int = 0,
    *,
    steps: int = 2,
    step: int = 5,
) -> StepPlan:
    """Plan these numbers of rollouts of each kind. Rollout i has i % 5 + 1 trainable tokens."""
    count = num_mixed + num_tied + num_zero_variance + num_denominator_only
    rollouts = [make_rollout(i, 9 + i % 7, i % 5 + 1) for i in range(count)]
    first_zero_variance = num_mixed + num_tied
    first_denominator_only = first_zero_variance + num_zero_variance
    tied_extras = [ExtraRollout(r, 0.05) for r in rollouts[num_mixed:first_zero_variance]]
    zero_variance_extras = [
        ExtraRollout(rollout, 0.0, 0.1 if i % 2 else -0.1)
        for i, rollout in enumerate(rollouts[first_zero_variance:first_denominator_only])
    ]
    return make_planner(optimizer_steps=steps).plan(
        step,
        rollouts[:num_mixed],
        [1.0] * num_mixed,
        [*zero_variance_extras, *tied_extras],
        [ExtraRollout(rollout, 0.0) for rollout in rollouts[first_denominator_only:]],
    )


def kind_in_plan(plan: StepPlan, index: int) -> str:
    if plan.entropy_advantages and plan.entropy_advantages[index]:
        return "zero_variance"
    return "tied" if plan.advantages[index] == 0.05 else "mixed"


def members_by_kind(plan: StepPlan) -> list[dict[str, list[int]]]:
    """Rollouts of each optimizer step by kind."""
    members: list[dict[str, list[int]]] = []
    for step in plan.optimizer_steps:
        by_kind: dict[str, list[int]] = {"mixed": [], "tied": [], "zero_variance": []}
        for index in members_of(step):
            by_kind[kind_in_plan(plan, index)].append(index)
        members.append(by_kind)
    return members


COUNTS = st.tuples(st.integers(0, 12), st.integers(0, 20), st.integers(0, 20), st.integers(0, 9))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(COUNTS, st.integers(1, 5))
def test_every_rollout_once(counts: tuple[int, int, int, int], steps: int) -> None:
    num_mixed, num_tied, num_zero_variance, _ = counts
    plan = plan_with_extras(*counts, steps=steps)
    members = [index for step in plan.optimizer_steps for index in members_of(step)]
    assert sorted(members) == list(range(len(plan.rollouts)))
    assert len(plan.optimizer_steps) == min(steps, num_mixed or num_tied + num_zero_variance)
    assert all(members_of(step) for step in plan.optimizer_steps)
    if num_mixed:
        assert len(plan.rollouts) == num_mixed + min(num_tied, num_mixed) + min(
            num_zero_variance, num_mixed
        )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(COUNTS, st.integers(1, 5))
def test_each_step_has_at_most_as_many_extras_of_a_kind_as_mixed_rollouts(
    counts: tuple[int, int, int, int], steps: int
) -> None:
    if counts[0]:
        for by_kind in members_by_kind(plan_with_extras(*counts, steps=steps)):
            assert len(by_kind["tied"]) <= len(by_kind["mixed"])
            assert len(by_kind["zero_variance"]) <= len(by_kind["mixed"])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(COUNTS, st.integers(1, 5))
def test_extras_never_count_in_denominators(counts: tuple[int, int, int, int], steps: int) -> None:
    num_mixed, _, _, num_denominator_only = counts
    plan = plan_with_extras(*counts, steps=steps)
    num_beyond_plan = 0.0
    for step, by_kind in zip(plan.optimizer_steps, members_by_kind(plan), strict=True):
        # Without mixed rollouts, all members count.
        countable = by_kind["mixed"] if num_mixed else members_of(step)
        num_beyond_plan += step.denominators.sequences - len(countable)
        assert step.denominators.sequences >= len(countable)
        if not num_denominator_only:
            tokens = sum(plan.rollouts[i].num_trainable for i in countable)
            assert step.denominators == Denominators(sequences=len(countable), tokens=tokens)
    assert num_beyond_plan == (num_denominator_only if plan.optimizer_steps else 0)


def test_extras_do_not_change_the_plan_of_mixed_rollouts() -> None:
    alone = plan_with_extras(9)
    together = plan_with_extras(9, num_tied=4, num_zero_variance=30)
    assert together.rollouts[:9] == alone.rollouts
    assert together.advantages[:9] == alone.advantages
    for alone_step, step in zip(alone.optimizer_steps, together.optimizer_steps, strict=True):
        assert step.denominators == alone_step.denominators
        assert sorted(members_of(alone_step)) == sorted(i for i in members_of(step) if i < 9)
    assert alone.entropy_advantages == ()


def test_sample_of_zero_variance_rollouts_depends_on_seed_and_step() -> None:
    plan = plan_with_extras(3, num_zero_variance=30)
    assert plan_with_extras(3, num_zero_variance=30) == plan
    assert plan_with_extras(3, num_zero_variance=30, step=6).rollouts[3:] != plan.rollouts[3:]


def test_extras_without_trainable_token_do_not_train() -> None:
    extra = ExtraRollout(make_rollout(1, 5, trainable=0), 0.0, 0.1)
    plan = make_planner().plan(0, [make_rollout(0, 5)], [1.0], [extra])
    assert [rollout.rollout_id for rollout in plan.rollouts] == ["t0"]


def test_denominator_only_rollouts_change_nothing_but_denominators() -> None:
    plain = plan_with_extras(4, steps=1)
    plan = plan_with_extras(4, num_denominator_only=2, steps=1)
    assert plan.rollouts == plain.rollouts
    (plain_step,) = plain.optimizer_steps
    (step,) = plan.optimizer_steps
    assert step.micro_batches == plain_step.micro_batches
    assert step.denominators.sequences == plain_step.denominators.sequences + 2
    assert step.denominators.tokens == plain_step.denominators.tokens + 5 + 1


def test_denominator_only_rollouts_alone_give_no_optimizer_step() -> None:
    assert plan_with_extras(0, num_denominator_only=3).optimizer_steps == ()


def test_extras_are_optional() -> None:
    rollouts = [make_rollout(i, 7) for i in range(6)]
    assert make_planner().plan(5, rollouts, [1.0] * 6) == make_plan([7] * 6)


@pytest.mark.parametrize("num_mixed", [0, 4])
def test_fewer_extras_than_optimizer_steps(num_mixed: int) -> None:
    plan = plan_with_extras(num_mixed, num_tied=1, num_zero_variance=1, steps=4)
    assert len(plan.optimizer_steps) == (num_mixed or 2)
    assert all(step.denominators.sequences == 1 for step in plan.optimizer_steps)
