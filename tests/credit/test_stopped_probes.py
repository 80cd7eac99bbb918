"""Credit of probes that were stopped because all of their responses are equally correct."""

from typing import Any

import pytest

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import CreditSettings, ParallelSettings, TrainSettings
from megatron_rl.contracts.group import Group, sampled_tokens
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.credit.account import account
from megatron_rl.credit.assign import BatchCredit, Credit
from megatron_rl.planning.step_planner import StepPlanner
from tests.support.groups import group

MIXED = group(1.0, 0.0, 1.0, 0.0, name="m", num_generated=[5, 5, 5, 5])
CORRECT_PROBE = group(1.0, 1.0, name="c", num_generated=[3, 4], weight=1.5)
INCORRECT_PROBE = group(0.0, 0.0, name="i", num_generated=[1, 2], weight=0.25)
PROBES = [CORRECT_PROBE, INCORRECT_PROBE]


def assign(*stopped_groups: Group, **settings: Any) -> BatchCredit:
    credit = Credit(GrpoSettings(), CreditSettings(**settings), max_new_tokens=10)
    return credit.assign([MIXED], stopped_groups)


def plan_of(credit: BatchCredit) -> StepPlan:
    train = TrainSettings(total_steps=1, optimizer_steps_per_batch=1)
    return StepPlanner(train, ParallelSettings(), dp_size=1, seed=0).plan(
        1,
        credit.rollouts,
        credit.advantages,
        credit.extra_rollouts,
        credit.denominator_only,
        weights=credit.weights,
    )


def test_stopped_probes_train_by_entropy_with_their_weight() -> None:
    credit = assign(*PROBES, all_correct="zvp", all_incorrect="zvp")
    extras = [(e.rollout.prompt_id, e.entropy_advantage, e.weight) for e in credit.extra_rollouts]
    assert extras == [("c", 0.1, 1.5)] * 2 + [("i", -0.1, 0.25)] * 2
    plan = plan_of(credit)
    assert dict(zip((r.prompt_id for r in plan.rollouts), plan.weights, strict=True)) == {
        "m": 1.0,
        "c": 1.5,
        "i": 0.25,
    }


def test_each_treatment_is_its_own() -> None:
    credit = assign(*PROBES, all_correct="zvp")
    assert {extra.rollout.prompt_id for extra in credit.extra_rollouts} == {"c"}
    assert assign(*PROBES).extra_rollouts == ()


def test_kept_probes_count_in_denominators_with_their_weight() -> None:
    credit = assign(*PROBES, all_correct="keep", all_incorrect="keep")
    assert credit.extra_rollouts == ()
    (step,) = plan_of(credit).optimizer_steps
    assert step.denominators.sequences == 4 + 2 * 1.5 + 2 * 0.25
    assert step.denominators.tokens == 20 + 7 * 1.5 + 3 * 0.25


def test_stopped_probes_are_no_groups_of_the_batch() -> None:
    zvp = assign(*PROBES, all_correct="zvp", all_incorrect="zvp")
    assert zvp.kinds == assign().kinds
    assert zvp.metrics() == assign().metrics()


def test_probes_that_are_tied_or_mixed_are_not_credited() -> None:
    tied_group = group(1.0, 1.0, name="t", num_generated=[1, 10])
    settings = {"all_correct": "zvp", "length": "buffer", "tied": "shape"}
    assert assign(tied_group, group(1.0, 0.0, name="x"), **settings).rollouts == MIXED.rollouts
    assert assign(tied_group, **settings).extra_rollouts == ()


def test_a_weight_of_zero_trains_nothing() -> None:
    never = group(1.0, 1.0, name="n", weight=0.0)
    plan = plan_of(assign(never, all_correct="zvp"))
    assert {ref.prompt_id for ref in plan.rollouts} == {"m"}


@pytest.mark.parametrize(
    ("all_correct", "num_applied", "tokens"),
    [
        ("zvp", 1, {"trained/mixed": 20, "trained/zero_variance": 7, "probe_stopped": 3}),
        ("zvp", 0, {"not_applied": 27, "probe_stopped": 3}),
        ("keep", 1, {"trained/mixed": 20, "probe_stopped": 10}),
        ("drop", 1, {"trained/mixed": 20, "probe_stopped": 10}),
    ],
)
def test_account_of_stopped_probes(
    all_correct: str, num_applied: int, tokens: dict[str, int]
) -> None:
    credit = assign(*PROBES, all_correct=all_correct)
    values = account(
        [MIXED],
        credit,
        plan_of(credit),
        num_applied,
        generated_tokens=sum(map(sampled_tokens, [MIXED, *PROBES])),
        stopped_groups=PROBES,
    )
    classes = {
        name.removeprefix("account/"): int(value)
        for name, value in values.items()
        if value and name != "account/generated"
    }
    assert classes == tokens
