"""The choice of samples: extremes first, random groups by seed and step, within the limit."""

import msgspec

from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.records.samples.sample import SampleKind
from megatron_rl.run.features.samples.selection import Choices, choose_samples
from tests.support.groups import group


def with_logprobs(original: Group, *logprobs: float | None) -> Group:
    rollouts = [
        msgspec.structs.replace(ref, mean_logprob=logprob)
        for ref, logprob in zip(original.rollouts, logprobs, strict=True)
    ]
    return msgspec.structs.replace(original, rollouts=tuple(rollouts))


GROUPS = [
    with_logprobs(group(1.0, 0.0, name="a", num_generated=[5, 6]), -0.1, -3.0),
    with_logprobs(group(0.0, 0.0, name="b", num_generated=[6, 2]), -0.5, -0.2),
    with_logprobs(group(1.0, None, name="c", num_generated=[9, 9]), -0.1, -0.1),
    with_logprobs(group(0.4, 1.0, name="d", num_generated=[4, 4]), -0.3, -0.4),
    *(with_logprobs(group(0.0, 1.0, name=name), -1.0, -1.0) for name in "efghij"),
]


def choose(
    groups: list[Group] = GROUPS,
    extremes: dict[SampleKind, RolloutRef] | None = None,
    seed: str = "0/samples/1",
    max_bytes: int = 10**6,
    num_groups: int = 8,
) -> Choices:
    return choose_samples(groups, extremes or {}, seed, max_bytes=max_bytes, max_groups=num_groups)


def kinds_by_id(choices: Choices) -> dict[str, list[str]]:
    return {c.rollout.rollout_id: [*map(str, c.kinds)] for c in choices.choices if c.kinds}


def test_extremes_compare_all_responses_and_the_first_of_equal_ones_counts() -> None:
    extremes = {
        SampleKind.MOST_CLIPPED: GROUPS[0].rollouts[1],
        SampleKind.HIGHEST_MISMATCH: GROUPS[2].rollouts[0],
    }
    assert kinds_by_id(choose(extremes=extremes)) == {
        "b/1": ["shortest", "surest-incorrect"],
        "c/0": ["longest", "highest-mismatch"],
        "a/1": ["most-clipped"],
    }


def test_no_response_is_surest_incorrect_without_an_incorrect_sampled_one() -> None:
    correct = [with_logprobs(group(1.0, None), -0.1, -0.1)]
    demonstrations = [with_logprobs(group(0.0, 0.0), None, None)]
    for groups in (correct, demonstrations):
        kinds = [kind for kinds in kinds_by_id(choose(groups)).values() for kind in kinds]
        assert sorted(kinds) == ["longest", "shortest"]


def test_whole_groups_are_kept_and_extremes_come_first() -> None:
    choices = choose(num_groups=5).choices
    ids = [choice.rollout.rollout_id for choice in choices]
    assert ids[:4] == ["b/1", "c/0", "b/0", "c/1"]
    assert len(ids) == 10 and len({choice.group for choice in choices}) == 5
    assert [choice.rollout for choice in choices] == [
        ref for choice in choices for ref in GROUPS[choice.group].rollouts if ref == choice.rollout
    ]


def test_random_groups_depend_on_the_seed_alone() -> None:
    assert choose(seed="0/samples/1") == choose(seed="0/samples/1")
    chosen_groups = {
        tuple(choice.group for choice in choose(seed=f"0/samples/{step}", num_groups=4).choices)
        for step in range(20)
    }
    assert len(chosen_groups) > 5


def test_fewer_groups_than_requested_are_all_kept() -> None:
    choices = choose(num_groups=100)
    assert len(choices.choices) == 20 and choices.num_left_out == 0
    assert choose([], num_groups=100).choices == ()


def test_one_group_holds_the_first_extreme() -> None:
    choices = choose(num_groups=1).choices
    assert [choice.rollout.rollout_id for choice in choices] == ["b/1", "b/0"]


def test_a_response_without_room_is_left_out_and_counted() -> None:
    """A token takes 40 bytes. The longest response is too long for the file, the others fit."""
    groups = [
        with_logprobs(group(1.0, 0.0, name="a", num_generated=[5, 5000]), -0.1, -3.0),
        with_logprobs(group(1.0, 0.0, name="b", num_generated=[5, 5]), -0.1, -3.0),
    ]
    choices = choose(groups, max_bytes=10**5)
    assert choices.num_left_out == 1
    assert sorted(c.rollout.rollout_id for c in choices.choices) == ["a/0", "b/0", "b/1"]
