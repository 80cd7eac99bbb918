import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import ParallelSettings, TrainSettings
from megatron_rl.contracts.group import RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.contracts.step_plan import OptimizerStep, StepPlan
from megatron_rl.planning.step_planner import StepPlanner


def make_rollout(index: int, length: int, trainable: int = 3) -> RolloutRef:
    return RolloutRef(
        rollout_id=f"t{index}",
        prompt_id="p",
        sample_index=index,
        num_inputs=length,
        num_trainable=trainable,
        finish_reason=FinishReason.STOP,
        tokens_by_version=((0, 1),),
        verdict=Verdict(reward=1.0, correctness=1.0),
        location=RolloutLocation(node=0, pid=1, fd=1, offset=0, nbytes=0),
    )


def make_planner(
    dp_size: int = 2,
    optimizer_steps: int = 2,
    tokens: int = 40,
    pp: int = 1,
    vpp: int = 1,
    seed: int = 0,
) -> StepPlanner:
    train = TrainSettings(
        total_steps=1, optimizer_steps_per_batch=optimizer_steps, tokens_per_micro_batch=tokens
    )
    return StepPlanner(train, ParallelSettings(pp=pp, vpp=vpp), dp_size=dp_size, seed=seed)


def make_plan(lengths: list[int], step: int = 5, **settings: int) -> StepPlan:
    rollouts = [make_rollout(i, length) for i, length in enumerate(lengths)]
    return make_planner(**settings).plan(step, rollouts, [1.0] * len(rollouts))


def members_of(step: OptimizerStep) -> list[int]:
    return [i for rank in step.micro_batches for micro_batch in rank for i in micro_batch]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=50),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_every_rollout_once_and_equal_micro_batch_counts(
    lengths: list[int], dp_size: int, optimizer_steps: int, pp: int
) -> None:
    plan = make_plan(lengths, dp_size=dp_size, optimizer_steps=optimizer_steps, pp=pp, vpp=2)
    members: list[int] = []
    for step in plan.optimizer_steps:
        assert len(step.micro_batches) == dp_size
        assert len({len(rank) for rank in step.micro_batches}) == 1
        assert len(step.micro_batches[0]) % pp == 0
        assert step.denominators.sequences == len(members_of(step))
        assert step.denominators.tokens == 3 * len(members_of(step))
        for rank in step.micro_batches:
            for indices in rank:
                tokens = sum(plan.rollouts[i].num_inputs for i in indices)
                assert len(indices) <= 1 or tokens <= 40
        members += members_of(step)
    assert sorted(members) == list(range(len(lengths)))
    assert len(plan.optimizer_steps) == min(optimizer_steps, len(lengths))


@pytest.mark.parametrize(("vpp", "count"), [(1, 1), (2, 4)])
def test_only_virtual_pipeline_chunks_need_a_multiple_of_micro_batches(
    vpp: int, count: int
) -> None:
    plan = make_plan([7], dp_size=1, pp=4, vpp=vpp)
    assert len(plan.optimizer_steps[0].micro_batches[0]) == count


def test_rollouts_without_gradient_are_left_out() -> None:
    rollouts = [make_rollout(0, 5), make_rollout(1, 5), make_rollout(2, 5, trainable=0)]
    plan = make_planner().plan(0, rollouts, [1.0, 0.0, -1.0])
    assert [rollout.rollout_id for rollout in plan.rollouts] == ["t0"]
    assert plan.advantages == (1.0,)


def test_one_trainable_token_is_enough() -> None:
    plan = make_planner().plan(7, [make_rollout(0, 5, trainable=1)], [1.0])
    assert len(plan.rollouts) == 1
    assert plan.step == 7


def test_a_step_without_usable_rollouts_is_skipped() -> None:
    assert make_planner().plan(0, [], []).optimizer_steps == ()


@pytest.mark.parametrize("advantages", [[1.0], [1.0, 1.0, 1.0]])
def test_every_rollout_needs_an_advantage(advantages: list[float]) -> None:
    with pytest.raises(ValueError, match="zip"):
        make_planner().plan(0, [make_rollout(0, 5), make_rollout(1, 5)], advantages)


def test_ranks_without_rollouts_get_empty_micro_batches() -> None:
    plan = make_plan([7], dp_size=3, optimizer_steps=1)
    assert plan.optimizer_steps[0].micro_batches == (((0,),), ((),), ((),))


@pytest.mark.parametrize(("lengths", "sizes"), [([25, 15], [2]), ([25, 16], [1, 1])])
def test_rollouts_that_fill_a_micro_batch_exactly_share_it(
    lengths: list[int], sizes: list[int]
) -> None:
    plan = make_plan(lengths, dp_size=1, optimizer_steps=1, tokens=40)
    (micro_batches,) = plan.optimizer_steps[0].micro_batches
    assert [len(micro_batch) for micro_batch in micro_batches] == sizes


def test_plan_depends_on_seed_and_step() -> None:
    lengths = list(range(1, 40))
    plan = make_plan(lengths)
    assert make_plan(lengths) == plan
    assert make_plan(lengths, step=6).rollouts != plan.rollouts
    assert make_plan(lengths, seed=1).rollouts != plan.rollouts


def test_ranks_are_balanced_by_tokens() -> None:
    plan = make_plan([30, 10, 10, 10], dp_size=2, optimizer_steps=1)
    totals = [
        sum(plan.rollouts[i].num_inputs for micro_batch in rank for i in micro_batch)
        for rank in plan.optimizer_steps[0].micro_batches
    ]
    assert totals == [30, 30]
