"""selection.reweight: prompts count equally, however often they are accepted."""

import random

import numpy as np
import pytest

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.credit.group_kinds import GroupKind, kind_of
from megatron_rl.prompts.selection.acceptance import Acceptance
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.selection.selector import SelectionResult
from megatron_rl.prompts.source import PromptSource
from tests.support.answers import make_pool, play

N = 8
RATES = (0.05, 0.3, 0.6, 0.8, 0.88)
POOL = make_pool(250, tags=len(RATES))
ROLLOUT = RolloutSettings(max_new_tokens=8, prompts_per_step=12, samples_per_prompt=N)
DATA = DataSettings(source="column_addition")


def make_selector(
    pool: list[Prompt] = POOL, *, acceptance: Acceptance | None = None, **settings: object
) -> BeliefSelector:
    return BeliefSelector(
        PromptSource(pool, pool[:1], DATA),
        ROLLOUT,
        SelectionSettings(name="belief", **settings),  # type: ignore[arg-type]
        seed=0,
        acceptance=acceptance or Acceptance(),
    )


def received_shares(
    skip: str, reweight: float | None, *, epochs: int
) -> dict[float, tuple[float, float]]:
    """Weighted mixed groups by pass rate, divided by uniform selection's.

    Uniform selection gives every prompt one whole group in each pass over the data. The second
    number is the standard error over the prompts.
    """
    selector = make_selector(skip=skip, reweight=reweight)
    rng = random.Random(1)
    totals = dict.fromkeys((prompt.id for prompt in POOL), 0.0)
    step = 0
    while selector.source.cursor.epoch < epochs:
        step += 1
        _, result = play(
            selector.select(step),
            lambda prompt, _: float(rng.random() < RATES[int(prompt.difficulty)]),
        )
        for group in result.groups:
            if kind_of(group) is GroupKind.MIXED:
                totals[group.prompt.id] += group.weight
    shares = {}
    for tag, rate in enumerate(RATES):
        mixed_shares = 1 - rate**N - (1 - rate) ** N
        values = np.array([totals[p.id] for p in POOL if p.difficulty == str(tag)])
        values = values / (epochs * mixed_shares)
        shares[rate] = float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)
    return shares


@pytest.mark.slow
@pytest.mark.parametrize("skip", ["all_correct", "zero_variance"])
def test_with_reweight_all_pass_rates_receive_their_share(skip: str) -> None:
    for rate, (share, error) in received_shares(skip, 10.0, epochs=25).items():
        assert error < 0.25, rate
        assert share == pytest.approx(1, abs=3.5 * error), rate


@pytest.mark.slow
def test_without_reweight_high_pass_rates_receive_less() -> None:
    shares = received_shares("all_correct", None, epochs=15)
    assert shares[0.3][0] == pytest.approx(1, abs=0.1)
    assert shares[0.88][0] < 0.8


def weights_after_steps(reweight: float | None) -> tuple[SelectionResult, dict[str, float]]:
    """Result and metrics of a step after some in which every second prompt was solved."""
    selector = make_selector(make_pool(100), reweight=reweight, probe_samples=0)

    def half_solved(prompt: Prompt, sample: int) -> float:
        return 1.0 if prompt.difficulty == "1" else float(sample % 2)

    for step in range(1, 30):
        play(selector.select(step), half_solved)
    selection = selector.select(30)
    _, result = play(selection, lambda prompt, sample: float(sample % 2))
    return result, selection.metrics()


def test_weights_are_inverse_acceptances_up_to_the_limit() -> None:
    result, metrics = weights_after_steps(reweight=10.0)
    weights = {group.prompt.difficulty: set[float]() for group in result.groups}
    for group in result.groups:
        weights[group.prompt.difficulty].add(group.weight)
    assert weights["0"] == {1.0}
    assert weights["1"] and all(2 <= weight <= 10 for weight in weights["1"])
    result_at_limit, _ = weights_after_steps(reweight=1.5)
    assert {g.weight for g in result_at_limit.groups if g.prompt.difficulty == "1"} == {1.5}
    all_weights = [group.weight for group in result.groups]
    assert metrics["select/weight_mean"] == pytest.approx(np.mean(all_weights))
    assert metrics["select/weight_max"] == max(all_weights)
    assert metrics["select/weight_p90"] == pytest.approx(np.quantile(all_weights, 0.9))


def test_acceptances_are_reported_whatever_the_weights() -> None:
    _, metrics = weights_after_steps(reweight=None)
    assert metrics["select/weight_max"] == metrics["select/weight_mean"] == 1.0
    assert metrics["select/acceptance_p10"] < 0.6
    assert metrics["select/acceptance_p90"] == 1.0
    assert metrics["select/acceptance_p10"] <= metrics["select/acceptance_p50"] <= 1.0


def test_groups_without_acceptance_have_weight_one() -> None:
    """If no prompt is accepted, the next one is sampled without a coin."""
    acceptance = Acceptance(minimum=1e-9, exponent=100.0, max_age_epochs=10**6)
    selector = make_selector(make_pool(3), reweight=10.0, acceptance=acceptance)
    for step in range(1, 10):
        _, result = play(selector.select(step), lambda prompt, sample: 1.0)
        assert len(result.groups) + len(result.stopped_groups) >= 1
    assert [group.weight for group in result.groups] == [1.0]
