"""What became of the tokens that were generated, worked out by hand and over random batches."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.algorithms import GrpoSettings, SftSettings
from megatron_rl.config.schema import CreditSettings, ParallelSettings, TrainSettings
from megatron_rl.contracts.group import Group, RolloutRef, Verdict, sampled_tokens
from megatron_rl.contracts.step_plan import Denominators, OptimizerStep, StepPlan
from megatron_rl.credit.account import account, usage, warning_of
from megatron_rl.credit.assign import BatchCredit, Credit
from megatron_rl.planning.step_planner import StepPlanner
from tests.support.groups import group, verdict

COUNTS = Denominators(sequences=1, tokens=1)


def plan() -> StepPlan:
    """Three rollouts of four trainable tokens; two optimizer steps on two ranks, a filler among
    their micro-batches.
    """
    rollouts: tuple[RolloutRef, ...] = group(1.0, 0.0, 1.0).rollouts
    first = OptimizerStep(micro_batches=(((0,), (1,)), ((), ())), denominators=COUNTS)
    second = OptimizerStep(micro_batches=(((),), ((2,),)), denominators=COUNTS)
    return StepPlan(
        step=0, rollouts=rollouts, advantages=(1.0, -1.0, 1.0), optimizer_steps=(first, second)
    )


def test_tokens_of_all_applied_steps_and_ranks_are_used() -> None:
    assert usage(plan(), 2, generated_tokens=16) == {
        "rollout/wasted_token_fraction": 0.25,
        "train/samples": 3.0,
        "train/zero_variance_samples": 0.0,
        "train/optimizer_steps": 2.0,
        "train/micro_batches": 3.0,
    }
    flat = msgspec.structs.replace(plan(), entropy_advantages=(0.1, 0.0, -0.1))
    assert usage(flat, 2, generated_tokens=16)["train/zero_variance_samples"] == 2.0


def test_tokens_of_a_step_that_was_not_applied_are_wasted() -> None:
    assert usage(plan(), 1, generated_tokens=16)["rollout/wasted_token_fraction"] == 0.5
    assert usage(plan(), 0, generated_tokens=16)["rollout/wasted_token_fraction"] == 1.0


def test_nothing_generated_is_nothing_wasted() -> None:
    assert usage(plan(), 2, generated_tokens=0)["rollout/wasted_token_fraction"] == 0.0


def planned(
    groups: list[Group], *, steps: int = 2, **credit: object
) -> tuple[BatchCredit, StepPlan]:
    settings_ = CreditSettings(**credit)  # type: ignore[arg-type]
    credited = Credit(GrpoSettings(), settings_, seed=0, max_new_tokens=100).assign(1, groups)
    train = TrainSettings(total_steps=1, optimizer_steps_per_batch=steps)
    planner = StepPlanner(train, ParallelSettings(), dp_size=2, seed=0)
    rollouts = planner.plan(
        1, credited.rollouts, credited.advantages, credited.uncounted, credited.kept
    )
    return credited, rollouts


def with_lost(drawn: Group, **tokens: int) -> Group:
    return msgspec.structs.replace(drawn, rejections=dict.fromkeys(tokens, 1), rejected_tokens=tokens)


def masked(drawn: Group, index: int) -> Group:
    """One of its rollouts may not be trained."""
    rollouts = [
        msgspec.structs.replace(r, num_trainable=0) if r.sample_index == index else r
        for r in drawn.rollouts
    ]
    return msgspec.structs.replace(drawn, rollouts=tuple(rollouts))


BATCH = [
    masked(group(1.0, 0.0, 0.5, None, 0.0, name="mixed", num_generated=[10, 20, 30, 40, 50]), 4),
    group(1.0, 1.0, name="right", num_generated=[20, 100]),
    group(0.0, 0.0, name="wrong", num_generated=[5, 6]),
    with_lost(group(1.0, name="few", num_generated=[7]), engine=8, stale=9),
    group(*[Verdict(reward=0.5, correctness=None)] * 2, name="judged", num_generated=[1, 2]),
    group(
        1.0,
        verdict(None),
        Verdict(reward=1.0, correctness=None),
        0.0,
        name="odd",
        num_generated=[1, 2, 4, 8],
    ),
]
TOKENS = sum(sampled_tokens(g) for g in BATCH)


def test_every_class_by_hand() -> None:
    at_the_mean = group(1.0, 0.5, 0.0, name="middle", num_generated=[3, 4, 5])
    batch = [*BATCH, at_the_mean]
    credited, step = planned(batch, length="buffer")
    probe, beyond = (
        group(0.0, 0.0, name=name, num_generated=[n, n]) for name, n in (("p", 11), ("s", 12))
    )
    found = account(
        batch,
        credited,
        step,
        2,
        generated_tokens=TOKENS + 12 + 22 + 1 + 24 + 26 + 100,
        stopped=[with_lost(probe, engine=1)],
        surplus=[beyond],
        carried=26,
    )
    assert found == {
        "account/trained/mixed": 10 + 20 + 30 + 1 + 8 + 3 + 5,
        "account/trained/tied": 0,
        "account/trained/flat": 0,
        "account/truncated_masked": 50,
        "account/no_verdict": 40 + 2 + 4,
        "account/at_the_mean": 4,
        "account/tied_dropped": 120,
        "account/zero_variance_dropped": 11,
        "account/too_few_verdicts": 7,
        "account/tied_reward": 3,
        "account/rejected/engine": 8 + 1,
        "account/stale": 9,
        "account/probe_stopped": 22,
        "account/surplus_cut": 24,
        "account/carried": 26,
        "account/generated": TOKENS + 185,
        "account/unaccounted": 100,
    }
    assert "100 of" in str(warning_of(found)) and "in no class" in str(warning_of(found))
    assert warning_of(found | {"account/unaccounted": 0.0}) is None
    assert "counted twice" in str(warning_of(found | {"account/unaccounted": -2.0}))


def test_flat_and_tied_groups_that_train_are_classes_of_their_own() -> None:
    batch = [group(1.0, 0.0, 0.0, 1.0, name="m"), *BATCH[1:3]]
    on = {"length": "buffer", "tied_correct": "shape", "all_incorrect": "zvp"}
    credited, step = planned(batch, **on)
    found = account(batch, credited, step, 2, generated_tokens=16 + 120 + 11)
    assert [found[f"account/trained/{name}"] for name in ("mixed", "tied", "flat")] == [16, 120, 11]
    assert found["account/unaccounted"] == 0
    stopped = account(batch, credited, step, 1, generated_tokens=16 + 120 + 11)
    trained = sum(stopped[f"account/trained/{name}"] for name in ("mixed", "tied", "flat"))
    assert stopped["account/not_applied"] == 147 - trained > 0 and trained > 0


def test_what_is_trained_without_comparing_is_accounted_by_its_kind() -> None:
    batch = [group(1.0, 1.0, name="a"), group(1.0, None, name="b")]
    credited = Credit(SftSettings(), seed=0).assign(1, batch)
    step = StepPlanner(TrainSettings(total_steps=1), ParallelSettings(), dp_size=1, seed=0).plan(
        1, credited.rollouts, credited.advantages
    )
    found = account(batch, credited, step, len(step.optimizer_steps), generated_tokens=16)
    assert (found["account/trained/flat"], found["account/trained/too_few_verdicts"]) == (8, 4)
    assert (found["account/no_verdict"], found["account/unaccounted"]) == (4, 0)


def test_what_is_trained_in_part_is_accounted_whole() -> None:
    """Of the rollout whose truth is unknown too, which algo.advantages=one trains all the same."""
    odd = group(1.0, Verdict(reward=1.0, correctness=None), name="a", num_generated=[4, 9])
    odd = msgspec.structs.replace(
        odd, rollouts=tuple(msgspec.structs.replace(r, num_trainable=3) for r in odd.rollouts)
    )
    credited = Credit(SftSettings(), seed=0).assign(1, [odd])
    planner = StepPlanner(TrainSettings(total_steps=1), ParallelSettings(), dp_size=1, seed=0)
    step = planner.plan(1, credited.rollouts, credited.advantages)
    found = account([odd], credited, step, len(step.optimizer_steps), generated_tokens=13)
    assert (found["account/trained/too_few_verdicts"], found["account/truncated_masked"]) == (6, 7)
    assert found["account/unaccounted"] == 0


SCORES = st.one_of(
    st.none(), st.sampled_from([0.0, 0.5, 1.0]), st.just(Verdict(reward=0.5, correctness=None))
)
ROLLOUTS = st.lists(
    st.tuples(SCORES, st.integers(0, 100), st.floats(0, 0.98), st.booleans()), max_size=5
)
LOST = st.dictionaries(st.sampled_from(["engine", "stale", "expired"]), st.integers(0, 50))


def drawn(
    name: str, rollouts: list[tuple[Verdict | float | None, int, float, bool]], lost: dict[str, int]
) -> Group:
    scores, tokens, repeated, trainable = (
        (list(column) for column in zip(*rollouts, strict=True)) if rollouts else [[]] * 4
    )
    made = with_lost(group(*scores, name=name, num_generated=tokens, repetition=repeated), **lost)
    for index, may in enumerate(trainable):
        made = made if may else masked(made, index)
    return made


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(ROLLOUTS, LOST), max_size=6),
    st.lists(st.tuples(ROLLOUTS, LOST), max_size=3),
    st.integers(0, 4),
    st.fixed_dictionaries(
        {
            "all_correct": st.sampled_from(["drop", "zvp", "keep"]),
            "all_incorrect": st.sampled_from(["drop", "zvp", "keep"]),
            "tied_correct": st.sampled_from(["drop", "shape"]),
            "tied_incorrect": st.sampled_from(["drop", "shape"]),
            "length": st.sampled_from([None, "buffer", "excess"]),
            "repetition_ngram": st.sampled_from([None, 4]),
        }
    ),
)
def test_the_classes_add_up_to_what_was_generated(
    made: list[tuple[list[tuple[Verdict | float | None, int, float, bool]], dict[str, int]]],
    beside: list[tuple[list[tuple[Verdict | float | None, int, float, bool]], dict[str, int]]],
    applied: int,
    credit: dict[str, object],
) -> None:
    batch = [drawn(str(i), *one) for i, one in enumerate(made)]
    others = [drawn(f"beside {i}", *one) for i, one in enumerate(beside)]
    credited, step = planned(batch, steps=3, **credit)
    tokens = sum(sampled_tokens(g) for g in (*batch, *others))
    split = len(others) // 2
    found = account(
        batch,
        credited,
        step,
        applied,
        generated_tokens=tokens,
        stopped=others[:split],
        surplus=others[split:],
    )
    assert found["account/unaccounted"] == 0
    classes = {
        name: n
        for name, n in found.items()
        if name not in ("account/generated", "account/unaccounted")
    }
    assert sum(classes.values()) == found["account/generated"] == tokens
    assert all(n >= 0 for n in classes.values())
    expected = usage(step, applied, generated_tokens=tokens)["rollout/wasted_token_fraction"]
    trained = sum(n for name, n in classes.items() if "/trained/" in name)
    assert tokens == 0 or trained / tokens == pytest.approx(1 - expected)
