"""Rollouts of groups without a contrast: trained beside the others, never in their denominators."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.contracts.step_plan import Denominators, ExtraRollout, StepPlan
from tests.planning.test_step_planner import plan, planner, rollout


def make(
    mixed: int, tied: int = 0, flat: int = 0, kept: int = 0, *, steps: int = 2, step: int = 5
) -> StepPlan:
    """Rollout i of a sort has i % 5 + 1 trained tokens."""
    refs = [rollout(i, 9 + i % 7, i % 5 + 1) for i in range(mixed + tied + flat + kept)]
    ties = [ExtraRollout(r, 0.05) for r in refs[mixed : mixed + tied]]
    flats = [
        ExtraRollout(r, 0.0, 0.1 if i % 2 else -0.1)
        for i, r in enumerate(refs[mixed + tied : mixed + tied + flat])
    ]
    held = refs[mixed + tied + flat :]
    return planner(optimizer_steps=steps).plan(
        step, refs[:mixed], [1.0] * mixed, [*flats, *ties], held
    )


def members(found: StepPlan) -> list[list[int]]:
    return [
        [i for rank in s.micro_batches for batch in rank for i in batch]
        for s in found.optimizer_steps
    ]


def sort_of(found: StepPlan, index: int) -> str:
    if found.entropy_advantages and found.entropy_advantages[index]:
        return "flat"
    return "tied" if found.advantages[index] == 0.05 else "mixed"


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 12), st.integers(0, 20), st.integers(0, 20), st.integers(0, 9), st.integers(1, 5)
)
def test_in_every_optimizer_step_ties_and_flat_ones_are_at_most_as_many_and_never_counted(
    mixed: int, tied: int, flat: int, kept: int, steps: int
) -> None:
    found = make(mixed, tied, flat, kept, steps=steps)
    dealt = members(found)
    assert sorted(i for step in dealt for i in step) == list(range(len(found.rollouts)))
    assert len(dealt) == min(steps, mixed or tied + flat)
    counted, tokens = 0, 0
    for step, indices in zip(found.optimizer_steps, dealt, strict=True):
        sorts = {
            s: [i for i in indices if sort_of(found, i) == s] for s in ("mixed", "tied", "flat")
        }
        assert indices
        if mixed:
            assert len(sorts["flat"]) <= len(sorts["mixed"]) and len(sorts["tied"]) <= len(
                sorts["mixed"]
            )
        own = sorts["mixed"] if mixed else indices
        held = step.denominators.sequences - len(own)
        assert held >= 0
        counted, tokens = counted + held, tokens + step.denominators.tokens
        if not kept:
            assert step.denominators == Denominators(
                sequences=len(own), tokens=sum(found.rollouts[i].num_trainable for i in own)
            )
    assert counted == (kept if dealt else 0), "kept ones are counted once"
    if mixed:
        assert len(found.rollouts) == mixed + min(tied, mixed) + min(flat, mixed)


def test_mixed_rollouts_are_planned_as_if_there_were_no_others() -> None:
    alone, beside = make(9), make(9, tied=4, flat=30)
    assert beside.rollouts[:9] == alone.rollouts and beside.advantages[:9] == alone.advantages
    assert [s.denominators for s in beside.optimizer_steps] == [
        s.denominators for s in alone.optimizer_steps
    ]
    for mine, theirs in zip(members(alone), members(beside), strict=True):
        assert sorted(mine) == sorted(i for i in theirs if i < 9)
    assert alone.entropy_advantages == ()


def test_the_flat_ones_that_train_follow_from_the_seed_and_the_step() -> None:
    assert make(3, flat=30) == make(3, flat=30)
    assert make(3, flat=30).rollouts[3:] != make(3, flat=30, step=6).rollouts[3:]


def test_flat_rollouts_without_a_trainable_token_do_not_train() -> None:
    result = planner().plan(
        0, [rollout(0, 5)], [1.0], [ExtraRollout(rollout(1, 5, trainable=0), 0.0, 0.1)]
    )
    assert [ref.rollout_id for ref in result.rollouts] == ["t0"]


def test_kept_rollouts_only_make_denominators_larger() -> None:
    plain, kept = make(4, steps=1), make(4, kept=2, steps=1)
    assert kept.rollouts == plain.rollouts
    (before,), (after,) = (found.optimizer_steps for found in (plain, kept))
    assert after.micro_batches == before.micro_batches
    assert after.denominators.sequences == before.denominators.sequences + 2
    assert after.denominators.tokens == before.denominators.tokens + 5 + 1
    assert make(0, kept=3).optimizer_steps == ()


def test_a_plan_without_them_is_what_it_always_was() -> None:
    assert planner().plan(5, [rollout(i, 7) for i in range(6)], [1.0] * 6) == plan([7] * 6)


@pytest.mark.parametrize("mixed", [0, 4])
def test_fewer_of_them_than_optimizer_steps(mixed: int) -> None:
    found = make(mixed, tied=1, flat=1, steps=4)
    assert len(found.optimizer_steps) == (mixed or 2)
    assert all(step.denominators.sequences == 1 for step in found.optimizer_steps)
