"""Beliefs that start from the pass rates of `data.pass_rates`."""

import msgspec
import numpy as np
import pytest

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionSettings
from megatron_rl.contracts.belief_state import BeliefState
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.prompts.pass_rates import PassRate
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.selection.beliefs.beliefs import Beliefs
from megatron_rl.prompts.selection.beliefs.group_prediction import GroupPrediction, GroupPredictions
from megatron_rl.prompts.selection.beliefs.pass_rate_prior import PassRatePrior
from megatron_rl.prompts.source import PromptSource
from tests.prompts.selection.beliefs.test_beliefs import group_of
from tests.support.answers import make_pool, play, play_steps

POOL = make_pool(40, tags=2)
IDS = [prompt.id for prompt in POOL]
LARGE_POOL = make_pool(400, tags=4)


def make_rates(*counts: tuple[int, int]) -> dict[str, PassRate]:
    """Rates of the first prompts, given as (correct, samples)."""
    return {
        prompt_id: PassRate(id=prompt_id, correct=correct, samples=samples)
        for prompt_id, (correct, samples) in zip(IDS, counts, strict=False)
    }


@pytest.mark.parametrize(
    ("correct", "samples", "noise"),
    [(16, 16, 1 / 32), (0, 16, 1 / 32), (8, 16, 1 / 66), (2, 4, 1 / 18)],
)
def test_variance_of_a_rate_is_that_of_one_group(correct: int, samples: int, noise: float) -> None:
    beliefs = Beliefs(IDS, make_rates((correct, samples)))
    _, variance = beliefs.initial_belief(POOL[0], 0)
    assert variance == pytest.approx(0.25 * noise / (0.25 + noise))


def test_mean_of_a_rate() -> None:
    beliefs = Beliefs(IDS, make_rates((16, 16), (0, 16), (8, 16)))
    means = [beliefs.initial_belief(prompt, 0)[0] for prompt in POOL[:3]]
    assert means[0] > 1.4
    assert means[1] == pytest.approx(np.pi / 2 - means[0])
    assert means[2] == pytest.approx(np.pi / 4)


def test_prompts_without_samples_start_from_their_stratum() -> None:
    beliefs = Beliefs(IDS, make_rates((0, 0)))
    prior = beliefs.stratum_prior(("t", "0"))
    assert beliefs.initial_belief(POOL[0], 0) == beliefs.initial_belief(POOL[2], 0) == prior


def test_variance_of_a_rate_grows_with_time() -> None:
    beliefs = Beliefs(IDS, make_rates((16, 16)))
    _, variance = beliefs.initial_belief(POOL[0], 0)
    assert beliefs.initial_belief(POOL[0], 100)[1] == pytest.approx(variance + 100 * 2e-4)


def test_first_groups_update_the_rate() -> None:
    beliefs = Beliefs(IDS, make_rates((16, 16)))
    mean, variance = beliefs.initial_belief(POOL[0], 1)
    beliefs.observe(1, [group_of(POOL[0], *[0.0] * 8)])
    gain = variance / (variance + 1 / 16)
    new_mean = np.frombuffer(beliefs.state().means, np.float32)[0]
    assert new_mean == pytest.approx(mean * (1 - gain))


def test_errors_of_rates_are_neither_drift_nor_process_noise() -> None:
    beliefs = Beliefs(IDS, make_rates((16, 16)))
    beliefs.observe(1, [group_of(POOL[0], *[0.0] * 8)])
    assert beliefs.state().drift == (0.0, 0.0)
    assert beliefs.process_noise == 2e-4


@pytest.mark.parametrize(("score", "variance"), [(1.0, None), (0.0, 0.25)])
def test_rates_that_first_groups_contradict_lose_certainty(
    score: float, variance: float | None
) -> None:
    beliefs = Beliefs(IDS, make_rates(*[(16, 16)] * 40))
    before = beliefs.initial_belief(POOL[-1], 3)[1]
    for step in (1, 2):
        prompts = POOL[8 * step : 8 * step + 8]
        beliefs.observe(step, [group_of(prompt, *[score] * 8) for prompt in prompts])
    after = beliefs.initial_belief(POOL[-1], 3)[1]
    assert after == (before if variance is None else variance)


def test_extra_variance_by_hand() -> None:
    """The sum of e² - V - R over the number of first groups and eight more, with a decay of 1 %."""
    prior = PassRatePrior()
    prior.learn(0.4)
    prior.learn(0.3)
    assert prior.extra_variance == pytest.approx(0.7 / 10)
    prior.decay(3)
    factor = 0.99**3
    assert prior.extra_variance == pytest.approx(0.7 * factor / (2 * factor + 8))


def test_inflated_variance_makes_rates_uninformative() -> None:
    beliefs = Beliefs(IDS, make_rates((16, 16)))
    beliefs.inflate_variance()
    assert beliefs.initial_belief(POOL[0], 3)[1] == 0.25


def predictions_of(beliefs: Beliefs) -> list[tuple[GroupPrediction, ...]]:
    predictions = GroupPredictions(beliefs, 2, (8,))
    return [predictions.of(prompt, beliefs.row(prompt)) for prompt in POOL]


def saved_state(beliefs: Beliefs) -> BeliefState:
    return msgspec.json.decode(msgspec.json.encode(beliefs.state()), type=BeliefState)


def beliefs_with_rates() -> Beliefs:
    """Beliefs with rates of 20 prompts. The first two prompts have groups."""
    beliefs = Beliefs(IDS, make_rates(*[(16, 16)] * 20))
    beliefs.observe(1, [group_of(POOL[0], *[0.0] * 8), group_of(POOL[1], 1.0, 0.0)])
    return beliefs


def test_restored_beliefs_with_rates_continue_bit_for_bit() -> None:
    beliefs = beliefs_with_rates()
    copy = Beliefs(IDS, make_rates(*[(16, 16)] * 20))
    copy.restore(saved_state(beliefs))
    assert predictions_of(copy) == predictions_of(beliefs)
    assert copy.state() == beliefs.state()


def test_a_checkpoint_overrides_the_rates_of_sampled_prompts_only() -> None:
    beliefs = beliefs_with_rates()
    with_other_rates = Beliefs(IDS, make_rates(*[(3, 16)] * 20))
    with_other_rates.restore(saved_state(beliefs))
    before = predictions_of(beliefs)
    after = predictions_of(with_other_rates)
    assert after[:2] == before[:2]
    assert after[2:20] != before[2:20]
    assert after[20:] == before[20:]


def make_selector(rates: dict[str, PassRate]) -> BeliefSelector:
    data = DataSettings(source="column_addition")
    rollout = RolloutSettings(max_new_tokens=8, prompts_per_step=12, samples_per_prompt=8)
    source = PromptSource(LARGE_POOL, LARGE_POOL[:1], data, rates=rates)
    return BeliefSelector(source, rollout, SelectionSettings(name="belief"), seed=0)


def all_correct_or_half(prompt: Prompt, sample: int) -> float:
    """Prompts with the tags 0 and 1 are all correct, others half of the time."""
    return float(prompt.difficulty in "01" or (sample + prompt.token_ids[0]) % 2)


def test_rates_skip_solved_prompts_from_the_first_step() -> None:
    rates = {
        prompt.id: PassRate(
            id=prompt.id, correct=16 if prompt.difficulty in "01" else 8, samples=16
        )
        for prompt in LARGE_POOL
    }
    metrics = []
    for given_rates in (rates, {}):
        step = make_selector(given_rates).select(1)
        play(step, all_correct_or_half)
        metrics.append(step.metrics())
    with_rates, without_rates = metrics
    assert with_rates["select/rollouts"] < 0.75 * without_rates["select/rollouts"]
    assert with_rates["select/mixed"] >= 0.9 * 12


def test_a_resumed_run_with_rates_makes_the_same_choices() -> None:
    rates = {
        prompt.id: PassRate(id=prompt.id, correct=i % 17, samples=16)
        for i, prompt in enumerate(LARGE_POOL)
    }
    selector = make_selector(rates)
    play_steps(selector, range(1, 5), all_correct_or_half)
    state = msgspec.json.decode(msgspec.json.encode(selector.state()), type=SelectorState)
    resumed_selector = make_selector(rates)
    resumed_selector.restore(state)
    results = play_steps(selector, range(5, 10), all_correct_or_half)
    assert play_steps(resumed_selector, range(5, 10), all_correct_or_half) == results
    assert resumed_selector.state() == selector.state()
    assert selector.state().beliefs.pass_rate_prior[1] > 0  # type: ignore[union-attr]
