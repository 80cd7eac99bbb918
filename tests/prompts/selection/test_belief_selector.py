"""Steps of the belief selector against simulated correctness, without engines."""

import random
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import (
    DataSettings,
    RolloutSettings,
    SelectionSettings,
)
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.credit.group_kinds import GroupKind, kind_of
from megatron_rl.prompts.pass_rates import PassRate
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.selection.acceptance import Acceptance
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.selection.importance_weights import extension_weight
from megatron_rl.prompts.selection.selector import RolloutRequest
from megatron_rl.prompts.selection.uniform import Uniform
from megatron_rl.prompts.source import PromptSource
from tests.support.answers import make_pool, play, play_steps

POOL = make_pool(400, tags=4)
PROMPTS_PER_STEP = 12
N = 8
ROLLOUT = RolloutSettings(max_new_tokens=8, prompts_per_step=PROMPTS_PER_STEP, samples_per_prompt=N)
DATA = DataSettings(source="column_addition")
ALWAYS_ACCEPT = Acceptance(exponent=0)
ALWAYS_PROBE = Acceptance(exponent=0, target=1.0)
HIGH_TARGET = Acceptance(target=0.8)
# Hardly any prompt that is probably useless is accepted
RARELY_ACCEPT = Acceptance(minimum=1e-9, exponent=100.0, max_age_epochs=10**6)


def make_selector(
    pool: list[Prompt] = POOL,
    *,
    seed: int = 0,
    rollout: RolloutSettings = ROLLOUT,
    acceptance: Acceptance | None = None,
    **settings: Any,
) -> BeliefSelector:
    selection = SelectionSettings(**{"name": "belief", "skip": "zero_variance"} | settings)
    return BeliefSelector(
        PromptSource(pool, pool[:1], DATA),
        rollout,
        selection,
        seed=seed,
        acceptance=acceptance or Acceptance(),
    )


PASS_RATES = {"0": 0.0, "1": 1.0, "2": 0.15, "3": 0.6}


def by_tag(prompt: Prompt, sample: int) -> float:
    """Scores with a pass rate by tag."""
    rng = random.Random(f"0/{prompt.id}/{sample}")
    return float(rng.random() < PASS_RATES[prompt.difficulty])


def all_correct(prompt: Prompt, sample: int) -> float:
    return 1.0


def all_incorrect(prompt: Prompt, sample: int) -> float:
    return 0.0


def first_requests(rounds: list[list[RolloutRequest]]) -> list[RolloutRequest]:
    return [request for requests in rounds for request in requests if not request.first_sample]


def extensions(rounds: list[list[RolloutRequest]]) -> list[RolloutRequest]:
    return [request for requests in rounds for request in requests if request.first_sample]


def num_rollouts(rounds: list[list[RolloutRequest]]) -> int:
    return sum(request.samples for requests in rounds for request in requests)


def test_mixed_groups_become_more_frequent() -> None:
    results = play_steps(make_selector(), range(1, 31), by_tag)
    rates = [metrics["select/mixed"] / metrics["select/rollouts"] for _, metrics in results[15:]]
    uniform_rate = 0.125 * 0.43  # 43 % of the groups of uniform selection are mixed
    assert sum(rates) > 1.4 * 15 * uniform_rate


def test_result_and_metrics_of_a_later_step() -> None:
    result, metrics = play_steps(make_selector(), range(1, 31), by_tag)[-1]
    num_mixed = sum(kind_of(group) is GroupKind.MIXED for group in result.groups)
    assert num_mixed == metrics["select/mixed"] >= 0.9 * PROMPTS_PER_STEP
    assert metrics["select/unfilled"] == 0
    assert metrics["select/miscalibrated"] == 0
    assert all(len(group.rollouts) == N for group in result.groups)
    for group in result.stopped_groups:
        assert kind_of(group) is not GroupKind.MIXED
        assert len(group.rollouts) < N
    stopped_ids = {group.group_id for group in result.stopped_groups}
    assert stopped_ids.isdisjoint(group.group_id for group in result.groups)


def test_choices_do_not_depend_on_the_order_of_arrival() -> None:
    selector = make_selector()
    other_selector = make_selector()
    results = play_steps(selector, range(1, 13), by_tag, order=0)
    assert play_steps(other_selector, range(1, 13), by_tag, order=99) == results
    assert other_selector.state() == selector.state()


def test_choices_depend_on_the_seed() -> None:
    results = play_steps(make_selector(), range(1, 13), by_tag)
    assert play_steps(make_selector(seed=1), range(1, 13), by_tag) != results


@pytest.mark.slow
def test_a_resumed_run_makes_the_same_choices() -> None:
    selector = make_selector()
    play_steps(selector, range(1, 9), by_tag)
    state = msgspec.json.decode(msgspec.json.encode(selector.state()), type=SelectorState)
    resumed_selector = make_selector()
    resumed_selector.restore(state)
    results = play_steps(selector, range(9, 25), by_tag)
    assert play_steps(resumed_selector, range(9, 25), by_tag) == results
    assert resumed_selector.state() == selector.state()


def test_a_state_without_beliefs_restores_the_cursor_alone() -> None:
    uniform = Uniform(PromptSource(POOL, POOL[:1], DATA), ROLLOUT)
    uniform.select(1)
    selector = make_selector()
    selector.restore(uniform.state())
    assert len(selector.beliefs) == 0
    assert selector.source.cursor == uniform.source.cursor


def test_a_state_of_other_prompts_is_refused() -> None:
    state = make_selector().state()
    with pytest.raises(PromptDataError, match="other training prompts"):
        make_selector(make_pool(7)).restore(state)


def test_probes_come_first_in_a_round() -> None:
    rounds, _ = play(make_selector(acceptance=HIGH_TARGET).select(1), by_tag)
    for requests in rounds:
        sizes = [request.samples for request in first_requests([requests])]
        assert sizes == sorted(sizes)


def test_mixed_probes_are_extended_with_a_weight() -> None:
    rounds, result = play(make_selector(acceptance=HIGH_TARGET).select(1), by_tag)
    extension_by_id = {f"g{request.index}": request for request in extensions(rounds)}
    assert extension_by_id
    for group in result.groups:
        extension = extension_by_id.get(group.group_id)
        if extension is None:
            assert group.weight == 1
            continue
        assert extension.first_sample + extension.samples == N
        assert [rollout.sample_index for rollout in group.rollouts] == list(range(N))
        weight = extension_weight(group, extension.first_sample, skip="zero_variance")
        assert group.weight == weight > 1


@pytest.mark.slow
def test_skip_all_correct_samples_hopeless_prompts_in_full() -> None:
    acceptance = Acceptance(minimum=0.02, max_age_epochs=1000)
    selector = make_selector(skip="all_correct", acceptance=acceptance)
    play_steps(selector, range(1, 40), by_tag)
    sizes: dict[str, list[int]] = {tag: [] for tag in "0123"}
    for step in range(40, 60):
        rounds, _ = play(selector.select(step), by_tag)
        for request in rounds[0]:
            sizes[request.prompt.difficulty].append(request.samples)
    assert set(sizes["0"]) == {N}
    assert len(sizes["1"]) < 0.2 * len(sizes["0"])
    assert N not in sizes["1"]


def test_skip_all_correct_stops_only_all_correct_probes() -> None:
    rounds, result = play(
        make_selector(skip="all_correct", acceptance=ALWAYS_PROBE).select(1), by_tag
    )
    tags = {request.prompt.difficulty for request in extensions(rounds)}
    assert "0" in tags
    assert "1" not in tags
    assert {kind_of(group) for group in result.stopped_groups} == {GroupKind.ALL_CORRECT}
    for group in result.groups:
        assert group.weight == 1 or kind_of(group) is GroupKind.MIXED


def test_calibration_compares_probes_before_their_extension() -> None:
    selection = make_selector(skip="all_correct", acceptance=ALWAYS_PROBE).select(1)
    _, result = play(selection, lambda prompt, sample: float(sample >= 4))
    assert any(kind_of(group) is GroupKind.MIXED for group in result.groups)
    assert selection.metrics()["select/observed_mixed"] == 0.0
    assert selection.metrics()["select/predicted_mixed"] > 0.0


@pytest.mark.slow
def test_hardly_useful_prompts_get_half_a_probe() -> None:
    selector = make_selector(acceptance=Acceptance(max_age_epochs=2))
    play_steps(selector, range(1, 40), by_tag)
    sizes = set()
    for step in range(40, 60):
        rounds, _ = play(selector.select(step), by_tag)
        sizes |= {request.samples for request in first_requests(rounds[:1])}
    assert sizes == {2, 4, 8}


def test_probes_are_halved_below_half_of_the_target() -> None:
    selector = make_selector(make_pool(24), probe_samples=6, acceptance=ALWAYS_PROBE)
    first_rounds, _ = play(selector.select(1), all_incorrect)
    second_rounds, _ = play(selector.select(2), all_incorrect)
    assert {request.samples for request in first_requests(first_rounds)} == {6}, "u = 0.67"
    assert {request.samples for request in first_requests(second_rounds)} == {3}, "u = 0.39"


def one_third_mixed(prompt: Prompt, sample: int) -> float:
    return float(prompt.token_ids[0] % 3 == 0 and sample % 2)


def test_a_further_round_requests_the_missing_groups() -> None:
    selection = make_selector(probe_samples=0, acceptance=ALWAYS_ACCEPT).select(1)
    rounds, _ = play(selection, one_third_mixed)
    assert len(rounds) > 1
    assert len(rounds[1]) < 0.8 * len(rounds[0])


@pytest.mark.parametrize(("num_mixed", "is_filled"), [(11, True), (10, False)])
def test_no_further_round_if_nine_tenths_of_the_step_are_mixed(
    num_mixed: int, is_filled: bool
) -> None:
    selection = make_selector(probe_samples=0, acceptance=ALWAYS_ACCEPT).select(1)
    mixed_ids: set[str] = set()

    def first_mixed(prompt: Prompt, sample: int) -> float:
        if len(mixed_ids) < num_mixed:
            mixed_ids.add(prompt.id)
        return float(prompt.id in mixed_ids and sample % 2)

    rounds, _ = play(selection, first_mixed)
    assert (len(rounds) == 1) is is_filled


def test_the_budget_holds_if_every_probe_is_extended() -> None:
    selection = make_selector(budget=1.0, acceptance=ALWAYS_PROBE).select(1)
    rounds, _ = play(selection, lambda prompt, sample: float(sample % 2))
    assert num_rollouts(rounds) == PROMPTS_PER_STEP * N
    assert selection.metrics()["select/probes_extended"] == PROMPTS_PER_STEP


def test_without_probes_every_group_is_whole() -> None:
    rounds, result = play(make_selector(probe_samples=0).select(1), by_tag)
    assert {request.samples for request in rounds[0]} == {N}
    assert result.stopped_groups == ()
    assert {group.weight for group in result.groups} == {1.0}


def test_a_step_samples_no_prompt_twice() -> None:
    selector = make_selector(make_pool(30, tags=4), acceptance=Acceptance(minimum=1.0))
    for step in range(1, 8):
        rounds, _ = play(selector.select(step), by_tag)
        ids = [request.prompt.id for request in first_requests(rounds)]
        assert len(ids) == len(set(ids))


def steps_by_prompt(selector: BeliefSelector, steps: int) -> dict[str, list[int]]:
    """Steps in which each prompt was sampled."""
    steps_by_id: dict[str, list[int]] = {prompt.id: [] for prompt in selector.source.train}
    for step in range(1, steps + 1):
        rounds, _ = play(selector.select(step), by_tag)
        for request in first_requests(rounds):
            steps_by_id[request.prompt.id].append(step)
    return steps_by_id


BY_MINIMUM = Acceptance(minimum=0.1, max_age_epochs=10**6)
BY_AGE = Acceptance(minimum=1e-9, max_age_epochs=8)


@pytest.mark.parametrize(
    ("skip", "acceptance"),
    [
        pytest.param("all_correct", BY_MINIMUM, id="all_correct-minimum"),
        pytest.param("zero_variance", BY_AGE, id="zero_variance-age"),
        pytest.param("all_correct", BY_AGE, id="all_correct-age", marks=pytest.mark.slow),
        pytest.param(
            "zero_variance", BY_MINIMUM, id="zero_variance-minimum", marks=pytest.mark.slow
        ),
    ],
)
def test_every_stratum_is_sampled(skip: str, acceptance: Acceptance) -> None:
    """Either limit alone gives each stratum a share of every pass over the data."""
    pool = make_pool(64, tags=4)
    selector = make_selector(pool, skip=skip, acceptance=acceptance)
    steps_by_id = steps_by_prompt(selector, 100)
    for tag in "0123":
        counts = [len(steps_by_id[prompt.id]) for prompt in pool if prompt.difficulty == tag]
        assert sum(counts) >= 0.08 * len(counts) * selector.source.cursor.epoch, tag


@pytest.mark.slow
@pytest.mark.parametrize("skip", ["all_correct", "zero_variance"])
def test_max_age_limits_the_declines_of_every_prompt(skip: str) -> None:
    """Half of the offers after `max_age_epochs` declines are accepted."""
    acceptance = Acceptance(minimum=1e-9, max_age_epochs=5)
    selector = make_selector(make_pool(64, tags=4), skip=skip, acceptance=acceptance)
    largest = 0.0
    for step in range(1, 101):
        selection = selector.select(step)
        play(selection, by_tag)
        largest = max(largest, selection.metrics()["select/declines_max"])
    assert 5 < largest <= 5 + 15


@pytest.mark.slow
def test_long_epochs_do_not_replace_the_filter() -> None:
    """Solved prompts stay rare however many steps an epoch takes, here more than 150."""
    pool = make_pool(1000, tags=2)
    rollout = RolloutSettings(max_new_tokens=8, prompts_per_step=2, samples_per_prompt=N)
    acceptance = Acceptance(minimum=0.02)
    selector = make_selector(pool, skip="all_correct", rollout=rollout, acceptance=acceptance)

    def half_solved(prompt: Prompt, sample: int) -> float:
        return 1.0 if prompt.difficulty == "1" else float(sample % 2)

    counts = {"0": 0, "1": 0}
    step = 0
    while selector.source.cursor.epoch < 3:
        step += 1
        rounds, _ = play(selector.select(step), half_solved)
        for request in first_requests(rounds):
            counts[request.prompt.difficulty] += selector.source.cursor.epoch > 0
    assert step > 3 * 150
    assert counts["0"] > 900, "two epochs of 500 prompts"
    assert counts["1"] < 0.1 * counts["0"]


@pytest.mark.parametrize("budget", [1.0, 1.5, 4.0])
def test_a_step_that_cannot_be_filled_ends_within_its_budget(budget: float) -> None:
    selector = make_selector(budget=budget)
    for step in range(1, 6):
        selection = selector.select(step)
        rounds, result = play(
            selection, lambda prompt, sample: float(prompt.id == "p3" and sample == 0)
        )
        metrics = selection.metrics()
        assert num_rollouts(rounds) == metrics["select/rollouts"]
        assert 0 < metrics["select/rollouts"] <= budget * PROMPTS_PER_STEP * N
        assert metrics["select/unfilled"] >= PROMPTS_PER_STEP - 1
        assert len(result.groups) + len(result.stopped_groups) == metrics["select/prompts"]


def test_a_step_ends_after_eight_passes_over_the_pass_rate_range() -> None:
    pool = make_pool(400)
    rates = {p.id: PassRate(id=p.id, correct=8 * (i < 3), samples=8) for i, p in enumerate(pool)}
    data = DataSettings(source="column_addition", pass_rate_range=[0.9, 1.0])
    settings = SelectionSettings(name="belief")
    source = PromptSource(pool, pool[:1], data, rates=rates)
    selector = BeliefSelector(source, ROLLOUT, settings, seed=0, acceptance=RARELY_ACCEPT)
    play(selector.select(1), all_correct)
    assert 7 <= source.cursor.epoch <= 8


def test_every_step_samples_something() -> None:
    selector = make_selector(make_pool(3), acceptance=Acceptance(minimum=1e-9, exponent=100.0))
    for step in range(1, 30):
        rounds, result = play(selector.select(step), all_correct)
        assert rounds
        assert result.groups + result.stopped_groups


def test_missing_verdicts_do_not_stall_selection() -> None:
    def with_gaps(prompt: Prompt, sample: int) -> float | None:
        return None if sample % 2 or prompt.difficulty == "0" else by_tag(prompt, sample)

    selector = make_selector()
    for step in range(1, 15):
        selection = selector.select(step)
        _, result = play(selection, with_gaps)
        assert all(1 <= group.weight <= N / 2 for group in result.groups)
        assert 0 <= selection.metrics()["select/observed_mixed"] <= 1


@pytest.mark.slow
def test_a_sudden_change_is_reported_as_miscalibration() -> None:
    selector = make_selector()
    play_steps(selector, range(1, 20), by_tag)
    results = play_steps(selector, range(20, 30), all_correct)
    assert max(metrics["select/miscalibrated"] for _, metrics in results) > 0.1


def test_metrics_of_a_step_with_a_single_prompt() -> None:
    selection = make_selector(make_pool(1), acceptance=Acceptance(minimum=1.0)).select(1)
    play(selection, lambda prompt, sample: float(sample % 2))
    metrics = selection.metrics()
    shares = ("acceptance", "accept_rate", "observed_mixed")
    assert [metrics[f"select/{name}"] for name in shares] == [1, 1, 1]
    assert metrics["select/predicted_mixed"] < 1
    assert [metrics[f"select/{name}"] for name in ("prompts", "mixed", "rounds")] == [1, 1, 1]
