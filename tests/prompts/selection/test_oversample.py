from collections.abc import Callable

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.selection.oversample import Oversample
from megatron_rl.prompts.source import PromptSource
from tests.support.answers import make_pool, play, play_steps

POOL = make_pool(40, tags=4)
ROLLOUT = RolloutSettings(max_new_tokens=8, prompts_per_step=4, samples_per_prompt=2)


def make_selector(pool: list[Prompt] = POOL, budget: float = 4.0) -> Oversample:
    settings = SelectionSettings(name="oversample", budget=budget)
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
