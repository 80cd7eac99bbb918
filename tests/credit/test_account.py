"""Classes of generated tokens, by hand and over random batches."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.algorithms import GrpoSettings, SftSettings
from megatron_rl.config.schema import CreditSettings, ParallelSettings, TrainSettings
from megatron_rl.contracts.group import Group, RolloutRef, Verdict, sampled_tokens
from megatron_rl.contracts.step_plan import Denominators, OptimizerStep, StepPlan
from megatron_rl.credit.account import account, account_of_recording, demonstrations, usage
from megatron_rl.credit.assign import BatchCredit, Credit
from megatron_rl.planning.step_planner import StepPlanner
from tests.support.groups import group, verdict

DENOMINATORS = Denominators(sequences=1, tokens=1)
TRAINED_CLASSES = ("trained/mixed", "trained/tied", "trained/zero_variance")


def three_rollout_plan() -> StepPlan:
    """Plan with three rollouts of four trainable tokens, two optimizer steps and two ranks."""
    rollouts: tuple[RolloutRef, ...] = group(1.0, 0.0, 1.0).rollouts
    first = OptimizerStep(micro_batches=(((0,), (1,)), ((), ())), denominators=DENOMINATORS)
    second = OptimizerStep(micro_batches=(((),), ((2,),)), denominators=DENOMINATORS)
    return StepPlan(
        step=0, rollouts=rollouts, advantages=(1.0, -1.0, 1.0), optimizer_steps=(first, second)
    )


def test_usage_counts_all_applied_steps_and_ranks() -> None:
    plan = three_rollout_plan()
    assert usage(plan, 2, generated_tokens=16) == {
        "rollout/wasted_token_fraction": 0.25,
        "train/samples": 3.0,
        "train/zero_variance_samples": 0.0,
        "train/optimizer_steps": 2.0,
        "train/micro_batches": 3.0,
    }
    zero_variance = msgspec.structs.replace(plan, entropy_advantages=(0.1, 0.0, -0.1))
    assert usage(zero_variance, 2, generated_tokens=16)["train/zero_variance_samples"] == 2.0


@pytest.mark.parametrize(("num_applied", "fraction"), [(1, 0.5), (0, 1.0)])
def test_tokens_of_unapplied_steps_are_wasted(num_applied: int, fraction: float) -> None:
    values = usage(three_rollout_plan(), num_applied, generated_tokens=16)
    assert values["rollout/wasted_token_fraction"] == fraction


def test_trained_tokens_that_no_engine_sampled_are_demonstrated() -> None:
    first, second, third = group(1.0, 0.0, 1.0).rollouts
    rollouts = (
        first,
        msgspec.structs.replace(second, num_generated=0),
        msgspec.structs.replace(third, num_generated=3),
    )
    plan = msgspec.structs.replace(three_rollout_plan(), rollouts=rollouts)
    assert demonstrations(plan, 2) == {"account/demonstrated": 4 + 1}
    assert demonstrations(plan, 1) == {"account/demonstrated": 4}
    assert demonstrations(plan, 0) == {"account/demonstrated": 0}
    assert demonstrations(three_rollout_plan(), 2) == {}


def test_tokens_of_a_recording_are_recorded_or_rejected() -> None:
    groups = [
        with_rejections(group(1.0, None, name="a"), routes_length=7, stale=5),
        group(0.0, 0.0, name="b", num_generated=[3, 2]),
    ]
    assert account_of_recording(groups, generated_tokens=26) == {
        "account/recorded": 8 + 5,
        "account/rejected/routes_length": 7,
        "account/stale": 5,
        "account/generated": 26,
        "account/unaccounted": 1,
    }
    assert account_of_recording([], generated_tokens=0)["account/recorded"] == 0


def test_no_generated_tokens_means_no_waste() -> None:
    values = usage(three_rollout_plan(), 2, generated_tokens=0)
    assert values["rollout/wasted_token_fraction"] == 0.0


def credit_and_plan(
    groups: list[Group], *, steps: int = 2, **settings: object
) -> tuple[BatchCredit, StepPlan]:
    credit_settings = CreditSettings(**settings)  # type: ignore[arg-type]
    assigner = Credit(GrpoSettings(), credit_settings, max_new_tokens=100)
    credit = assigner.assign(groups)
    train = TrainSettings(total_steps=1, optimizer_steps_per_batch=steps)
    planner = StepPlanner(train, ParallelSettings(), dp_size=2, seed=0)
    plan = planner.plan(
        1, credit.rollouts, credit.advantages, credit.extra_rollouts, credit.denominator_only
    )
    return credit, plan


def sft_credit_and_plan(groups: list[Group]) -> tuple[BatchCredit, StepPlan]:
    credit = Credit(SftSettings(), compares_groups=False).assign(groups)
    planner = StepPlanner(TrainSettings(total_steps=1), ParallelSettings(), dp_size=1, seed=0)
    return credit, planner.plan(1, credit.rollouts, credit.advantages)


def with_rejections(group_: Group, **tokens: int) -> Group:
    return msgspec.structs.replace(
        group_, rejections=dict.fromkeys(tokens, 1), rejected_tokens=tokens
    )


def with_untrainable(group_: Group, index: int) -> Group:
    """Mask all tokens of one rollout."""
    rollouts = [
        msgspec.structs.replace(rollout, num_trainable=0)
        if rollout.sample_index == index
        else rollout
        for rollout in group_.rollouts
    ]
    return msgspec.structs.replace(group_, rollouts=tuple(rollouts))


BATCH = [
    with_untrainable(
        group(1.0, 0.0, 0.5, None, 0.0, name="mixed", num_generated=[10, 20, 30, 40, 50]), 4
    ),
    group(1.0, 1.0, name="correct", num_generated=[20, 100]),
    group(0.0, 0.0, name="incorrect", num_generated=[5, 6]),
    with_rejections(group(1.0, name="few", num_generated=[7]), engine=8, stale=9),
    group(*[Verdict(reward=0.5, correctness=None)] * 2, name="reward only", num_generated=[1, 2]),
    group(
        1.0,
        verdict(None),
        Verdict(reward=1.0, correctness=None),
        0.0,
        name="some correctness",
        num_generated=[1, 2, 4, 8],
    ),
]
TOKENS = sum(sampled_tokens(group_) for group_ in BATCH)


def test_every_class_by_hand() -> None:
    zero_advantage = group(1.0, 0.5, 0.0, name="middle", num_generated=[3, 4, 5])
    batch = [*BATCH, zero_advantage]
    credit, plan = credit_and_plan(batch, length="buffer")
    probe = group(0.0, 0.0, name="p", num_generated=[11, 11])
    surplus = group(0.0, 0.0, name="s", num_generated=[12, 12])
    values = account(
        batch,
        credit,
        plan,
        2,
        generated_tokens=TOKENS + 12 + 22 + 1 + 24 + 5 + 6 + 100,
        stopped_groups=[with_rejections(probe, engine=1)],
        surplus_groups=[surplus],
        unused_tokens={"surplus_cut": 5, "surplus_aborted": 6},
    )
    assert values == {
        "account/trained/mixed": 10 + 20 + 30 + 1 + 8 + 3 + 5,
        "account/trained/tied": 0,
        "account/trained/zero_variance": 0,
        "account/truncated_masked": 50,
        "account/no_verdict": 40 + 2 + 4,
        "account/zero_advantage": 4,
        "account/tied_dropped": 120,
        "account/zero_variance_dropped": 11,
        "account/too_few_verdicts": 7,
        "account/tied_reward": 3,
        "account/rejected/engine": 8 + 1,
        "account/stale": 9,
        "account/probe_stopped": 22,
        "account/surplus_cut": 24 + 5,
        "account/surplus_aborted": 6,
        "account/generated": TOKENS + 170,
        "account/unaccounted": 100,
    }


def test_trained_tied_and_zero_variance_groups_have_own_classes() -> None:
    batch = [group(1.0, 0.0, 0.0, 1.0, name="m"), *BATCH[1:3]]
    treatments = {"length": "buffer", "tied": "shape", "all_incorrect": "zvp"}
    credit, plan = credit_and_plan(batch, **treatments)
    values = account(batch, credit, plan, 2, generated_tokens=16 + 120 + 11)
    assert [values[f"account/{name}"] for name in TRAINED_CLASSES] == [16, 120, 11]
    assert values["account/unaccounted"] == 0
    one_step = account(batch, credit, plan, 1, generated_tokens=16 + 120 + 11)
    trained_tokens = sum(one_step[f"account/{name}"] for name in TRAINED_CLASSES)
    assert trained_tokens > 0
    assert one_step["account/not_applied"] == 147 - trained_tokens > 0


def test_credit_of_another_batch_has_no_account() -> None:
    credit, plan = credit_and_plan(BATCH)
    with pytest.raises(ValueError, match="zip"):
        account(BATCH[:-1], credit, plan, 2, generated_tokens=TOKENS)


def test_class_follows_kind_with_constant_advantages() -> None:
    batch = [group(1.0, 1.0, name="a"), group(1.0, None, name="b")]
    credit, plan = sft_credit_and_plan(batch)
    values = account(batch, credit, plan, len(plan.optimizer_steps), generated_tokens=16)
    assert values["account/trained/zero_variance"] == 8
    assert values["account/trained/too_few_verdicts"] == 4
    assert values["account/no_verdict"] == 4
    assert values["account/unaccounted"] == 0


def test_partly_masked_rollouts_without_correctness_are_fully_accounted() -> None:
    """Without comparisons a step trains the rollout without a correctness, too."""
    partial = group(1.0, Verdict(reward=1.0, correctness=None), name="a", num_generated=[4, 9])
    rollouts = tuple(msgspec.structs.replace(r, num_trainable=3) for r in partial.rollouts)
    partial = msgspec.structs.replace(partial, rollouts=rollouts)
    credit, plan = sft_credit_and_plan([partial])
    values = account([partial], credit, plan, len(plan.optimizer_steps), generated_tokens=13)
    assert values["account/trained/too_few_verdicts"] == 6
    assert values["account/truncated_masked"] == 7
    assert values["account/unaccounted"] == 0


RolloutExample = tuple[Verdict | float | None, int, float, bool]
GroupExample = tuple[list[RolloutExample], dict[str, int]]

SCORES = st.one_of(
    st.none(), st.sampled_from([0.0, 0.5, 1.0]), st.just(Verdict(reward=0.5, correctness=None))
)
ROLLOUTS = st.lists(
    st.tuples(SCORES, st.integers(0, 100), st.floats(0, 0.98), st.booleans()), max_size=5
)
REJECTIONS = st.dictionaries(st.sampled_from(["engine", "stale", "expired"]), st.integers(0, 50))
GROUPS = st.tuples(ROLLOUTS, REJECTIONS)


def make_group(name: str, example: GroupExample) -> Group:
    rollouts, rejections = example
    made_group = group(
        *[score for score, _, _, _ in rollouts],
        name=name,
        num_generated=[tokens for _, tokens, _, _ in rollouts],
        repetition=[repetition for _, _, repetition, _ in rollouts],
    )
    made_group = with_rejections(made_group, **rejections)
    for index, (_, _, _, is_trainable) in enumerate(rollouts):
        if not is_trainable:
            made_group = with_untrainable(made_group, index)
    return made_group


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(GROUPS, max_size=6),
    st.lists(GROUPS, max_size=3),
    st.integers(0, 4),
    st.fixed_dictionaries(
        {
            "all_correct": st.sampled_from(["drop", "zvp", "keep"]),
            "all_incorrect": st.sampled_from(["drop", "zvp", "keep"]),
            "tied": st.sampled_from(["drop", "shape"]),
            "length": st.sampled_from([None, "buffer", "excess"]),
            "repetition_ngram": st.sampled_from([None, 4]),
        }
    ),
)
def test_classes_sum_to_generated_tokens(
    batch_examples: list[GroupExample],
    unused_examples: list[GroupExample],
    num_applied: int,
    credit_settings: dict[str, object],
) -> None:
    batch = [make_group(str(i), example) for i, example in enumerate(batch_examples)]
    unused_groups = [
        make_group(f"unused {i}", example) for i, example in enumerate(unused_examples)
    ]
    credit, plan = credit_and_plan(batch, steps=3, **credit_settings)
    tokens = sum(sampled_tokens(group_) for group_ in (*batch, *unused_groups))
    split = len(unused_groups) // 2
    values = account(
        batch,
        credit,
        plan,
        num_applied,
        generated_tokens=tokens,
        stopped_groups=unused_groups[:split],
        surplus_groups=unused_groups[split:],
    )
    wasted_share = usage(plan, num_applied, generated_tokens=tokens)[
        "rollout/wasted_token_fraction"
    ]
    check_sums(values, wasted_share, tokens)


def check_sums(values: dict[str, float], wasted_share: float, tokens: int) -> None:
    assert values.pop("account/unaccounted") == 0
    assert values.pop("account/generated") == tokens
    assert sum(values.values()) == tokens
    assert all(count >= 0 for count in values.values())
    trained_tokens = sum(count for name, count in values.items() if "/trained/" in name)
    assert tokens == 0 or trained_tokens / tokens == pytest.approx(1 - wasted_share)
