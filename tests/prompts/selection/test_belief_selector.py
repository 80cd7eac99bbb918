"""Steps of the belief selector against made-up correctness: no engines."""

import random
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise

import msgspec
import pytest

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionExpertSettings, SelectionSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.credit.group_kinds import Kind, kind_of
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.selection.importance_weights import extension_weight
from megatron_rl.prompts.selection.uniform import Uniform
from megatron_rl.prompts.source import PromptSource
from tests.support.answers import make_pool, play, play_steps

POOL = make_pool(400, tags=4)
WANTED, N = 12, 8
ROLLOUT = RolloutSettings(max_new_tokens=8, prompts_per_step=WANTED, samples_per_prompt=N)
DATA = DataSettings(source="column_addition")


def selector(pool: list[Prompt] = POOL, *, seed: int = 0, **settings: object) -> BeliefSelector:
    names = {field.name for field in fields(SelectionExpertSettings)} & set(settings)
    expert = SelectionExpertSettings(**{name: settings.pop(name) for name in names})  # type: ignore[arg-type]
    defaults = {"name": "belief", "skip": "zero_variance", "expert": expert}
    chosen = SelectionSettings(**(defaults | settings))  # type: ignore[arg-type]
    return BeliefSelector(PromptSource(pool, pool[:1], DATA), ROLLOUT, chosen, seed=seed)


def graded(seed: int = 0) -> Callable[[Prompt, int], float]:
    """Tags 0 and 1 are never right and always right, 2 and 3 sometimes."""
    share = {"0": 0.0, "1": 1.0, "2": 0.15, "3": 0.6}
    return lambda prompt, i: float(
        random.Random(f"{seed}/{prompt.id}/{i}").random() < share[prompt.difficulty]
    )


def right(prompt: Prompt, sample: int) -> float:
    return 1.0


def test_steps_come_to_ask_what_gives_mixed_groups() -> None:
    told = play_steps(selector(), range(1, 31), graded())
    rates = [metrics["select/mixed"] / metrics["select/rollouts"] for _, metrics in told]
    assert sum(rates[15:]) > 1.4 * 15 * 0.125 * 0.43, "of uniform's: 43 % of groups are mixed"
    chosen, metrics = told[-1]
    assert (
        sum(kind_of(group) is Kind.MIXED for group in chosen.groups)
        == metrics["select/mixed"]
        >= 0.9 * WANTED
    )
    assert metrics["select/unfilled"] == 0 and metrics["select/miscalibrated"] == 0
    assert not {group.group_id for group in chosen.groups} & {
        group.group_id for group in chosen.stopped
    }
    assert all(
        kind_of(group) is not Kind.MIXED and len(group.rollouts) < N for group in chosen.stopped
    )
    assert all(len(group.rollouts) == N for group in chosen.groups)


def test_choices_do_not_depend_on_the_order_in_which_groups_arrive() -> None:
    one, other = selector(), selector()
    assert play_steps(one, range(1, 13), graded(), order=0) == play_steps(
        other, range(1, 13), graded(), order=99
    )
    assert one.state() == other.state()
    assert play_steps(selector(seed=1), range(1, 13), graded()) != play_steps(
        selector(), range(1, 13), graded()
    )


def test_a_resumed_run_chooses_as_one_that_was_never_stopped() -> None:
    whole, first, resumed = selector(), selector(), selector()
    play_steps(whole, range(1, 9), graded()), play_steps(first, range(1, 9), graded())
    saved = msgspec.json.encode(first.state())
    resumed.restore(msgspec.json.decode(saved, type=SelectorState))
    assert play_steps(resumed, range(9, 25), graded()) == play_steps(whole, range(9, 25), graded())
    assert resumed.state() == whole.state()


def test_a_run_that_had_no_beliefs_begins_with_none() -> None:
    uniform = Uniform(PromptSource(POOL, POOL[:1], DATA), ROLLOUT)
    uniform.select(1)
    begun = selector()
    begun.restore(uniform.state())
    assert len(begun.beliefs) == 0 and begun.source.cursor == uniform.source.cursor
    with pytest.raises(PromptDataError, match="other training prompts"):
        selector(make_pool(7)).restore(uniform.state())


def test_probes_come_first_and_are_extended_where_they_are_mixed() -> None:
    asked = selector(acceptance_target=0.8)
    rounds, chosen = play(asked.select(1), graded())
    for asks in rounds:
        begun = [ask.samples for ask in asks if ask.first_sample == 0]
        assert begun == sorted(begun)
    extended = {ask.index: ask for asks in rounds for ask in asks if ask.first_sample}
    assert extended and all(ask.first_sample + ask.samples == N for ask in extended.values())
    groups = {group.group_id: group for group in chosen.groups}
    for index, ask in extended.items():
        group = groups[f"g{index}"]
        assert [r.sample_index for r in group.rollouts] == list(range(N))
        assert group.weight == extension_weight(group, ask.first_sample, skip="zero_variance") > 1
    assert all(group.weight == 1 for name, group in groups.items() if int(name[1:]) not in extended)


def test_what_is_hard_is_asked_as_ever_where_only_what_is_solved_is_skipped() -> None:
    asked = selector(skip="all_correct", min_acceptance=0.02, max_age_steps=1000)
    play_steps(asked, range(1, 40), graded())
    drawn: dict[str, list[int]] = {tag: [] for tag in "0123"}
    for step in range(40, 60):
        for ask in play(asked.select(step), graded())[0][0]:
            drawn[ask.prompt.difficulty].append(ask.samples)
    assert set(drawn["0"]) == {N}, "never right: all rollouts at once"
    assert len(drawn["1"]) < 0.2 * len(drawn["0"]) and N not in drawn["1"], (
        "always right: probed, and seldom"
    )


def test_a_probe_goes_on_unless_it_is_all_right_where_only_what_is_solved_is_skipped() -> None:
    asked = selector(skip="all_correct", acceptance_target=1.0, acceptance_exponent=0)
    rounds, chosen = play(asked.select(1), graded())
    extended = {ask.prompt.difficulty for asks in rounds for ask in asks if ask.first_sample}
    assert "0" in extended and "1" not in extended
    assert chosen.stopped and all(kind_of(group) is Kind.ALL_CORRECT for group in chosen.stopped)
    assert all(group.weight == 1 for group in chosen.groups if kind_of(group) is not Kind.MIXED)


def test_probes_are_compared_with_what_was_predicted_of_them_not_with_what_they_became() -> None:
    asked = selector(skip="all_correct", acceptance_target=1.0, acceptance_exponent=0)
    selection = asked.select(1)
    _, chosen = play(selection, lambda prompt, i: float(i >= 4))
    assert any(kind_of(group) is Kind.MIXED for group in chosen.groups), "extended ones"
    assert (
        selection.metrics()["select/observed_mixed"]
        == 0.0
        < selection.metrics()["select/predicted_mixed"]
    )


def test_a_prompt_that_hardly_gives_a_mixed_group_gets_half_a_probe() -> None:
    asked = selector(max_age_steps=5)
    play_steps(asked, range(1, 40), graded())
    sizes = {
        ask.samples
        for step in range(40, 60)
        for ask in play(asked.select(step), graded())[0][0]
        if ask.first_sample == 0
    }
    assert sizes == {2, 4, 8}


def test_probes_shrink_by_half_below_half_of_the_target() -> None:
    asked = selector(make_pool(24), probe_samples=6, acceptance_target=1.0, acceptance_exponent=0)
    first, second = (play(asked.select(step), lambda prompt, i: 0.0)[0] for step in (1, 2))
    assert {ask.samples for asks in first for ask in asks} == {6}, "u = 0.67"
    assert {ask.samples for asks in second for ask in asks} == {3}, "u = 0.39 after six wrong ones"


def a_third(prompt: Prompt, sample: int) -> float:
    """Every third prompt is right half of the time."""
    return float(prompt.token_ids[0] % 3 == 0 and sample % 2)


def test_a_further_round_asks_for_what_is_missing_unless_there_is_enough() -> None:
    rounds, _ = play(selector(probe_samples=0, acceptance_exponent=0).select(1), a_third)
    assert len(rounds) > 1 and len(rounds[1]) < 0.8 * len(rounds[0]), "a third was mixed"
    assert len(play(selector(probe_samples=0, acceptance_exponent=0, min_filled=0.25).select(1), a_third)[0]) == 1


def test_a_budget_holds_when_every_probe_is_extended() -> None:
    selection = selector(budget=1.0, acceptance_target=1.0, acceptance_exponent=0).select(1)
    rounds, _ = play(selection, lambda prompt, i: float(i % 2))
    assert sum(ask.samples for asks in rounds for ask in asks) == WANTED * N
    assert selection.metrics()["select/probes_extended"] == WANTED


def test_without_probes_every_group_is_whole() -> None:
    rounds, chosen = play(selector(probe_samples=0).select(1), graded())
    assert {ask.samples for ask in rounds[0]} == {N} and chosen.stopped == ()
    assert {group.weight for group in chosen.groups} == {1.0}


def test_no_question_is_asked_twice_in_a_step() -> None:
    asked = selector(make_pool(30, tags=4), min_acceptance=1.0)
    for step in range(1, 8):
        rounds, _ = play(asked.select(step), graded())
        ids = [ask.prompt.id for asks in rounds for ask in asks if ask.first_sample == 0]
        assert len(ids) == len(set(ids))


@pytest.mark.parametrize("skip", ["all_correct", "zero_variance"])
@pytest.mark.parametrize(("floor", "age"), [(0.1, 10**6), (1e-9, 20)])
def test_no_stratum_is_starved_whatever_is_believed_of_it(
    skip: str, floor: float, age: int
) -> None:
    """The floor alone gives each stratum its share of every pass over the data; the age alone each
    of its prompts.
    """
    pool, steps = make_pool(64, tags=4), 100
    asked = selector(pool, skip=skip, min_acceptance=floor, max_age_steps=age)
    drawn: dict[str, list[int]] = {prompt.id: [] for prompt in pool}
    for step in range(1, steps + 1):
        for asks in play(asked.select(step), graded())[0]:
            for ask in asks:
                drawn[ask.prompt.id] += [step] * (ask.first_sample == 0)
    for tag in "0123":
        own = [drawn[prompt.id] for prompt in pool if prompt.difficulty == tag]
        assert sum(map(len, own)) >= 0.08 * len(own) * asked.source.cursor.epoch, tag
    if age < steps:
        waits = [
            after - before
            for each in drawn.values()
            for before, after in pairwise([0, *each, steps])
        ]
        assert max(waits) <= 2.5 * age, "half of the offers after `age` steps are taken"


@pytest.mark.parametrize("budget", [1.0, 1.5, 4.0])
def test_a_step_that_cannot_be_filled_trains_on_what_it_has(budget: float) -> None:
    asked = selector(budget=budget)
    for step in range(1, 6):
        selection = asked.select(step)
        rounds, chosen = play(selection, lambda prompt, i: float(prompt.id == "p3" and i == 0))
        drawn = sum(ask.samples for asks in rounds for ask in asks)
        metrics = selection.metrics()
        assert drawn == metrics["select/rollouts"] <= budget * WANTED * N and drawn > 0
        assert metrics["select/unfilled"] >= WANTED - 1
        assert len(chosen.groups) + len(chosen.stopped) == metrics["select/prompts"]


def test_a_hopeless_pool_is_asked_all_the_same() -> None:
    asked = selector(make_pool(3), min_acceptance=1e-9, acceptance_exponent=100.0)
    for step in range(1, 30):
        rounds, chosen = play(asked.select(step), right)
        assert rounds and chosen.groups + chosen.stopped


def test_missing_verdicts_stall_nothing() -> None:
    def lost(prompt: Prompt, i: int) -> float | None:
        return None if i % 2 or prompt.difficulty == "0" else graded()(prompt, i)

    asked = selector()
    for step in range(1, 15):
        selection = asked.select(step)
        _, chosen = play(selection, lost)
        assert all(1 <= group.weight <= N / 2 for group in chosen.groups)
        assert 0 <= selection.metrics()["select/observed_mixed"] <= 1


def test_wrong_predictions_are_told() -> None:
    asked, told = selector(), 0.0
    play_steps(asked, range(1, 20), graded())
    for step in range(20, 30):
        selection = asked.select(step)
        play(selection, right)  # whatever was learnt no longer holds
        told = max(told, selection.metrics()["select/miscalibrated"])
    assert told > 0.1
