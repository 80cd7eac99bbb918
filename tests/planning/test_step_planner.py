from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import ParallelSettings, TrainSettings
from megatron_rl.contracts.group import RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.planning.step_planner import StepPlanner


def rollout(index: int, length: int, trainable: int = 3) -> RolloutRef:
    return RolloutRef(
        rollout_id=f"t{index}",
        prompt_id="p",
        sample_index=index,
        num_inputs=length,
        num_trainable=trainable,
        finish_reason=FinishReason.STOP,
        versions=(0,),
        verdict=Verdict(reward=1.0, correctness=1.0),
        location=RolloutLocation(node=0, pid=1, fd=1, offset=0, nbytes=0),
    )


def planner(
    dp_size: int = 2, optimizer_steps: int = 2, tokens: int = 40, pp: int = 1, vpp: int = 1
) -> StepPlanner:
    train = TrainSettings(
        total_steps=1, optimizer_steps_per_batch=optimizer_steps, tokens_per_micro_batch=tokens
    )
    return StepPlanner(train, ParallelSettings(pp=pp, vpp=vpp), dp_size=dp_size, seed=0)


def plan(lengths: list[int], step: int = 5, **settings: int) -> StepPlan:
    rollouts = [rollout(i, n) for i, n in enumerate(lengths)]
    return planner(**settings).plan(step, rollouts, [1.0] * len(rollouts))


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=50),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_every_rollout_once_and_the_same_counts_everywhere(
    lengths: list[int], dp_size: int, optimizer_steps: int, pp: int
) -> None:
    result = plan(lengths, dp_size=dp_size, optimizer_steps=optimizer_steps, pp=pp, vpp=2)
    seen: list[int] = []
    for step in result.optimizer_steps:
        assert len(step.micro_batches) == dp_size
        assert len({len(bins) for bins in step.micro_batches}) == 1
        assert len(step.micro_batches[0]) % pp == 0
        members = [i for bins in step.micro_batches for batch in bins for i in batch]
        assert step.denominators.sequences == len(members)
        assert step.denominators.tokens == 3 * len(members)
        for bins in step.micro_batches:
            for batch in bins:
                assert len(batch) <= 1 or sum(result.rollouts[i].num_inputs for i in batch) <= 40
        seen += members
    assert sorted(seen) == list(range(len(lengths)))
    assert len(result.optimizer_steps) == min(optimizer_steps, len(lengths))


def test_only_virtual_stages_need_a_multiple_of_micro_batches() -> None:
    assert len(plan([7], dp_size=1, pp=4).optimizer_steps[0].micro_batches[0]) == 1
    assert len(plan([7], dp_size=1, pp=4, vpp=2).optimizer_steps[0].micro_batches[0]) == 4


def test_rollouts_without_gradient_are_left_out() -> None:
    rollouts = [rollout(0, 5), rollout(1, 5), rollout(2, 5, trainable=0)]
    result = planner().plan(0, rollouts, [1.0, 0.0, -1.0])
    assert [ref.rollout_id for ref in result.rollouts] == ["t0"]
    assert result.advantages == (1.0,)


def test_nothing_usable_is_a_skipped_step() -> None:
    assert planner().plan(0, [], []).optimizer_steps == ()


def test_a_rank_without_rollouts_gets_fillers() -> None:
    result = plan([7], dp_size=3, optimizer_steps=1)
    assert result.optimizer_steps[0].micro_batches == (((0,),), ((),), ((),))


def test_the_plan_is_reproducible_and_shuffled_by_step() -> None:
    lengths = list(range(1, 40))
    assert plan(lengths) == plan(lengths)
    assert plan(lengths, step=6).rollouts != plan(lengths).rollouts
    other_seed = StepPlanner(TrainSettings(total_steps=1), ParallelSettings(), dp_size=2, seed=1)
    assert (
        other_seed.plan(5, [rollout(i, n) for i, n in enumerate(lengths)], [1.0] * 39).rollouts
        != plan(lengths).rollouts
    )


def test_ranks_are_balanced_by_tokens() -> None:
    result = plan([30, 10, 10, 10], dp_size=2, optimizer_steps=1)
    totals = sorted(
        sum(result.rollouts[i].num_inputs for batch in bins for i in batch)
        for bins in result.optimizer_steps[0].micro_batches
    )
    assert totals == [30, 30]
