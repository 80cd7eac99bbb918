from collections.abc import Callable

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.credit.group_kinds import Kind, kind_of
from megatron_rl.prompts.selection.oversample import Oversample
from megatron_rl.prompts.source import PromptSource
from tests.support.answers import make_pool, play, play_steps

POOL = make_pool(40, tags=4)
ROLLOUT = RolloutSettings(max_new_tokens=8, prompts_per_step=4, samples_per_prompt=2)


def selector(pool: list[Prompt] = POOL, **settings: object) -> Oversample:
    chosen = SelectionSettings(name="oversample", **settings)  # type: ignore[arg-type]
    source = PromptSource(pool, pool[:1], DataSettings(source="column_addition", shuffle=False))
    return Oversample(source, ROLLOUT, chosen)


def mixed_tags(*tags: str) -> Callable[[Prompt, int], float]:
    return lambda prompt, i: float(prompt.difficulty in tags and i == 0)


def test_rounds_follow_until_enough_groups_are_mixed_and_the_surplus_is_cut() -> None:
    selection = selector().select(1)
    rounds, chosen = play(selection, mixed_tags("0", "1", "3"))  # three of each four
    assert [[ask.index for ask in asks] for asks in rounds] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [group.group_id for group in chosen.groups] == ["g0", "g1", "g2", "g3", "g4", "g6"]
    assert [group.group_id for group in chosen.surplus] == ["g5", "g7"] and chosen.stopped == ()
    metrics = selection.metrics()
    assert (metrics["select/rounds"], metrics["select/mixed"], metrics["select/surplus"]) == (
        2,
        4,
        2,
    )
    assert (metrics["select/rollouts"], metrics["select/observed_mixed"]) == (16, 0.75)


def test_a_question_whose_group_was_kept_is_not_asked_again_beside_it() -> None:
    keeping = selector(make_pool(8, tags=4), surplus="keep")
    play(keeping.select(1), mixed_tags("0", "1", "3"))
    kept = {group.prompt.id for group in keeping.kept}
    rounds, _ = play(keeping.select(2), mixed_tags())
    asked = [ask.prompt.id for asks in rounds for ask in asks]
    assert kept == {"p5", "p7"} and sorted(asked) == ["p0", "p1", "p2", "p3", "p4", "p6"]


def test_the_budget_ends_a_step_that_is_not_full() -> None:
    selection = selector(budget=2.9).select(1)
    rounds, chosen = play(selection, mixed_tags("0"))
    assert len(rounds) == 2 and len(chosen.groups) == 8
    assert selection.metrics()["select/unfilled"] == 2


def test_a_step_asks_no_question_twice_and_ends_with_the_pool() -> None:
    rounds, chosen = play(selector(make_pool(6), budget=100).select(1), mixed_tags())
    assert (
        sorted(group.prompt.id for group in chosen.groups) == [f"p{i}" for i in range(6)]
        and len(rounds) == 2
    )


def test_a_resumed_run_chooses_as_one_that_was_never_stopped() -> None:
    whole, first, resumed = selector(), selector(), selector()
    scores = mixed_tags("0", "3")
    assert play_steps(whole, (1, 2, 3), scores, order=5) == play_steps(
        first, (1, 2, 3), scores, order=8
    )
    resumed.restore(first.state())
    assert play_steps(resumed, (4, 5, 6), scores) == play_steps(whole, (4, 5, 6), scores)
