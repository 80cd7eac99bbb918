from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contracts.group import RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.plan import StepPlan
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.planning.step_plan import plan_step


def sample(index: int, length: int, trainable: int = 3) -> RolloutRef:
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


def plan(lengths: list[int], **settings: int) -> StepPlan:
    defaults = {"dp_size": 2, "optimizer_steps": 2, "tokens_per_micro_batch": 40}
    samples = [sample(i, n) for i, n in enumerate(lengths)]
    return plan_step(5, samples, [1.0] * len(samples), **(defaults | settings))


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=50),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_every_sample_once_and_the_same_counts_everywhere(
    lengths: list[int], dp_size: int, optimizer_steps: int, multiple: int
) -> None:
    result = plan(lengths, dp_size=dp_size, optimizer_steps=optimizer_steps, micro_batch_multiple=multiple)
    seen: list[int] = []
    for step in result.optimizer_steps:
        assert len(step.micro_batches) == dp_size
        assert len({len(bins) for bins in step.micro_batches}) == 1
        assert len(step.micro_batches[0]) % multiple == 0
        members = [i for bins in step.micro_batches for batch in bins for i in batch]
        assert step.denominators.sequences == len(members)
        assert step.denominators.tokens == 3 * len(members)
        for bins in step.micro_batches:
            for batch in bins:
                assert len(batch) <= 1 or sum(result.samples[i].num_inputs for i in batch) <= 40
        seen += members
    assert sorted(seen) == list(range(len(lengths)))
    assert len(result.optimizer_steps) == min(optimizer_steps, len(lengths))


def test_samples_without_gradient_are_left_out() -> None:
    samples = [sample(0, 5), sample(1, 5), sample(2, 5, trainable=0)]
    result = plan_step(0, samples, [1.0, 0.0, -1.0], dp_size=1, optimizer_steps=1, tokens_per_micro_batch=99)
    assert [s.rollout_id for s in result.samples] == ["t0"]
    assert result.advantages == (1.0,)


def test_nothing_usable_is_a_skipped_step() -> None:
    assert plan_step(0, [], [], dp_size=2, optimizer_steps=4, tokens_per_micro_batch=9).optimizer_steps == ()


def test_a_rank_without_samples_gets_fillers() -> None:
    result = plan([7], dp_size=3, optimizer_steps=1)
    assert result.optimizer_steps[0].micro_batches == (((0,),), ((),), ((),))


def test_the_plan_is_reproducible_and_shuffled_by_step() -> None:
    lengths = list(range(1, 40))
    assert plan(lengths) == plan(lengths)
    other = plan_step(
        6,
        [sample(i, n) for i, n in enumerate(lengths)],
        [1.0] * 39,
        dp_size=2,
        optimizer_steps=2,
        tokens_per_micro_batch=40,
    )
    assert other.samples != plan(lengths).samples


def test_ranks_are_balanced_by_tokens() -> None:
    result = plan([30, 10, 10, 10], dp_size=2, optimizer_steps=1)
    totals = sorted(
        sum(result.samples[i].num_inputs for batch in bins for i in batch)
        for bins in result.optimizer_steps[0].micro_batches
    )
    assert totals == [30, 30]
