from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.selection.oversample import Oversample
from megatron_rl.prompts.source import PromptSource
from tests.support.answers import answer, make_pool, play, play_steps

POOL = make_pool(40, tags=4)
ROLLOUT = RolloutSettings(max_new_tokens=8, prompts_per_step=4, samples_per_prompt=2)


def make_selector(
    pool: list[Prompt] = POOL,
    budget: float = 4.0,
    surplus: Literal["finish", "abort"] = "finish",
) -> Oversample:
    settings = SelectionSettings(name="oversample", budget=budget, surplus=surplus)
    source = PromptSource(pool, pool[:1], DataSettings(source="column_addition", shuffle=False))
    return Oversample(source, ROLLOUT, settings)


def mixed_tags(*tags: str) -> Callable[[Prompt, int], float]:
    """Prompts with these tags give mixed groups, others are all incorrect."""
    return lambda prompt, sample: float(prompt.difficulty in tags and sample == 0)


def ids_of(groups: tuple[Group, ...]) -> list[str]:
    return [group.group_id for group in groups]


def test_rounds_follow_until_enough_groups_are_mixed() -> None:
    selection = make_selector().select(1)
    rounds, result = play(selection, mixed_tags("0", "1", "3"))  # three of each four
    indices = [[request.index for request in requests] for requests in rounds]
    assert indices == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ids_of(result.groups) == ["g0", "g1", "g2", "g3", "g4", "g6"]
    assert ids_of(result.surplus_groups) == ["g5", "g7"]
    assert result.stopped_groups == ()


def test_metrics_by_hand() -> None:
    selection = make_selector().select(1)
    play(selection, mixed_tags("0", "1", "3"))
    assert selection.metrics() == {
        "select/observed_mixed": 0.75,
        "select/prompts": 8.0,
        "select/rollouts": 16.0,
        "select/mixed": 4.0,
        "select/unfilled": 0.0,
        "select/surplus": 2.0,
        "select/rounds": 2.0,
    }


def test_the_budget_ends_a_step_that_is_not_filled() -> None:
    selection = make_selector(budget=2.9).select(1)
    rounds, result = play(selection, mixed_tags("0"))
    assert len(rounds) == 2
    assert len(result.groups) == 8
    assert selection.metrics()["select/unfilled"] == 2


def test_a_step_samples_no_prompt_twice_and_ends_with_the_pool() -> None:
    selection = make_selector(make_pool(6), budget=100).select(1)
    rounds, result = play(selection, mixed_tags())
    prompt_ids = [group.prompt.id for group in result.groups]
    assert sorted(prompt_ids) == [f"p{i}" for i in range(6)]
    assert len(rounds) == 2


def test_choices_do_not_depend_on_the_order_of_arrival() -> None:
    scores = mixed_tags("0", "3")
    results = [play_steps(make_selector(), (1, 2, 3), scores, order=order) for order in (5, 8)]
    assert results[0] == results[1]


def test_a_resumed_run_makes_the_same_choices() -> None:
    selector = make_selector()
    scores = mixed_tags("0", "3")
    play_steps(selector, (1, 2, 3), scores)
    resumed_selector = make_selector()
    resumed_selector.restore(selector.state())
    results = play_steps(selector, (4, 5, 6), scores)
    assert play_steps(resumed_selector, (4, 5, 6), scores) == results


def test_a_step_is_filled_by_exactly_as_many_mixed_groups() -> None:
    rounds, _ = play(make_selector().select(1), mixed_tags("0", "1", "2", "3"))
    assert [len(requests) for requests in rounds] == [4]


def test_a_budget_of_two_rounds_allows_two() -> None:
    rounds, _ = play(make_selector(budget=2.0).select(1), mixed_tags())
    assert [len(requests) for requests in rounds] == [4, 4]


def test_a_single_group_with_verdicts_is_the_whole_share() -> None:
    """Scorers failed on the other groups."""
    selection = make_selector(budget=1.0).select(1)
    play(
        selection,
        lambda prompt, sample: float(sample) if prompt.difficulty == "0" else None,
    )
    assert selection.metrics()["select/observed_mixed"] == 1.0


def test_the_shortest_prefix_with_enough_mixed_groups_decides_the_step() -> None:
    """Groups 0, 2, 3 and 4 are mixed. Group 7 is, too, and arrives before group 4."""
    selection = make_selector(surplus="abort").select(1)
    scores = mixed_tags("0", "2", "3")
    requests = [*selection.first_round()]
    for request in requests:
        selection.handle_group(request.index, answer(request, scores))
        assert selection.num_needed() is None
    later = selection.next_round()
    for request in (later[3], later[0], later[1]):
        selection.handle_group(request.index, answer(request, scores))
    assert selection.num_needed() == 5
    assert selection.next_round() == []
    result = selection.result()
    assert ids_of(result.groups) == ["g0", "g1", "g2", "g3", "g4"]
    assert result.surplus_groups == ()
    assert selection.metrics() == {
        "select/observed_mixed": 0.8,
        "select/prompts": 8.0,
        "select/rollouts": 16.0,
        "select/mixed": 4.0,
        "select/unfilled": 0.0,
        "select/surplus": 3.0,
        "select/rounds": 2.0,
    }


def test_a_gap_keeps_the_step_open() -> None:
    selection = make_selector(surplus="abort").select(1)
    scores = mixed_tags("0", "1", "2", "3")
    for request in selection.first_round()[1:]:
        selection.handle_group(request.index, answer(request, scores))
        assert selection.num_needed() is None


def test_a_surplus_that_is_finished_decides_nothing_early() -> None:
    selection = make_selector().select(1)
    scores = mixed_tags("0", "1", "2", "3")
    for request in selection.first_round():
        selection.handle_group(request.index, answer(request, scores))
        assert selection.num_needed() is None


def test_a_step_that_is_not_filled_needs_all_groups() -> None:
    selection = make_selector(surplus="abort", budget=2.0).select(1)
    rounds, result = play(selection, mixed_tags("0"))
    assert (len(rounds), len(result.groups)) == (2, 8)
    assert selection.num_needed() is None
    assert selection.metrics()["select/surplus"] == 0


@pytest.mark.slow
@given(
    st.sets(st.sampled_from("0123"), min_size=1),
    st.integers(0, 2**32),
    st.integers(0, 2**32),
)
def test_an_aborted_surplus_depends_on_no_order_of_arrival(
    tags: set[str], order: int, other_order: int
) -> None:
    """Neither does what it leaves: it is what a finished one leaves, up to the last mixed group."""
    scores = mixed_tags(*tags)
    steps = (1, 2, 3)
    results = [
        play_steps(make_selector(surplus="abort"), steps, scores, order=seed)
        for seed in (order, other_order)
    ]
    assert results[0] == results[1]
    whole_selector = make_selector()
    selector = make_selector(surplus="abort")
    for step in steps:
        _, whole = play(whole_selector.select(step), scores, order=order)
        _, result = play(selector.select(step), scores, order=other_order)
        assert result.groups == whole.groups[: len(result.groups)]
        assert not any(g.prompt.difficulty in tags for g in whole.groups[len(result.groups) :])
    assert whole_selector.state() == selector.state()
