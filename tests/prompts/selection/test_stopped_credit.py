"""Stopped probes that train by entropy are credited about as much as whole groups."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import (
    CreditSettings,
    DataSettings,
    RolloutSettings,
    SelectionSettings,
)
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.credit.assign import Credit
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.selection.beliefs.group_prediction import GroupPrediction
from megatron_rl.prompts.selection.candidate import Candidate
from megatron_rl.prompts.selection.selector import SelectionResult
from megatron_rl.prompts.source import PromptSource
from tests.support.answers import make_pool, play
from tests.support.groups import group

N = 8
NUM_PROMPTS = 150
EPOCHS = 15
ROLLOUT = RolloutSettings(max_new_tokens=8, prompts_per_step=12, samples_per_prompt=N)


def pass_rates() -> np.ndarray:
    """Pass rates of three strata, float64 [prompts]."""
    centers = np.array([-2.5, 0.0, 2.5])[np.arange(NUM_PROMPTS) % 3]
    return 1 / (1 + np.exp(-np.random.default_rng(0).normal(centers, 2.0)))


def results_of(pool: list[Prompt], rates: np.ndarray, **settings: Any) -> Iterator[SelectionResult]:
    """Select prompts in some passes over the data."""
    rate_by_id = dict(zip((prompt.id for prompt in pool), rates.tolist(), strict=True))
    source = PromptSource(pool, pool[:1], DataSettings(source="column_addition"))
    selection = SelectionSettings(name="belief", **settings)
    selector = BeliefSelector(source, ROLLOUT, selection, seed=0)
    rng = random.Random(0)
    step = 0
    while source.cursor.epoch < EPOCHS:
        step += 1
        _, result = play(
            selector.select(step), lambda prompt, _: float(rng.random() < rate_by_id[prompt.id])
        )
        yield result


def credited_shares(*, with_stopped: bool = True, **settings: Any) -> tuple[float, float]:
    """Weighted all-correct and all-incorrect rollouts that are credited.

    They are shares of the expectation for uniform selection: one whole group of each prompt in each
    pass over the data.
    """
    rates = pass_rates()
    credit_settings = CreditSettings(all_correct="zvp", all_incorrect="zvp")
    credit = Credit(GrpoSettings(), credit_settings)
    totals = {True: 0.0, False: 0.0}
    for result in results_of(make_pool(NUM_PROMPTS, tags=3), rates, **settings):
        stopped_groups = result.stopped_groups if with_stopped else ()
        for extra in credit.assign(result.groups, stopped_groups).extra_rollouts:
            totals[extra.entropy_advantage > 0] += extra.weight
    expected_correct = EPOCHS * N * float((rates**N).sum())
    expected_incorrect = EPOCHS * N * float(((1 - rates) ** N).sum())
    return totals[True] / expected_correct, totals[False] / expected_incorrect


@pytest.mark.parametrize(
    "skip", ["all_correct", pytest.param("zero_variance", marks=pytest.mark.slow)]
)
def test_with_reweight_zero_variance_groups_are_credited_as_with_uniform_selection(
    skip: str,
) -> None:
    """Up to the calibration of the beliefs."""
    assert credited_shares(skip=skip, reweight=10.0) == pytest.approx((1, 1), abs=0.2)


@pytest.mark.slow
def test_without_stopped_probes_hardly_any_all_correct_group_is_credited() -> None:
    correct, incorrect = credited_shares(reweight=10.0, with_stopped=False)
    assert correct < 0.3
    assert incorrect == pytest.approx(1, abs=0.2)


@pytest.mark.slow
def test_without_reweight_solved_prompts_are_credited_as_seldom_as_they_are_sampled() -> None:
    correct, incorrect = credited_shares()
    assert 0.1 < correct < 0.5
    assert incorrect == pytest.approx(1, abs=0.2)


def stopped_probe(*scores: float | None) -> Candidate:
    """Probe of four rollouts that was not extended, with an acceptance of one half."""
    whole = GroupPrediction(all_correct=0.2, all_incorrect=0.1)
    first = GroupPrediction(all_correct=0.4, all_incorrect=0.3)
    candidate = Candidate(make_pool(1)[0], 0.5, N, 4, whole, first)
    candidate.add(group(*scores))
    return candidate


@pytest.mark.parametrize(
    ("scores", "factor"),
    [
        ((1.0, 1.0, 1.0, 1.0), 8 / 4 * 0.2 / 0.4),
        ((0.0, 0.0, 0.0, 0.0), 8 / 4 * 0.1 / 0.3),
        ((1.0, 0.0, 0.0, 0.0), 1.0),
        ((1.0, None, None, None), 1.0),
    ],
    ids=["all correct", "all incorrect", "mixed", "too few verdicts"],
)
def test_weight_of_a_stopped_probe_by_hand(scores: tuple[float | None, ...], factor: float) -> None:
    candidate = stopped_probe(*scores)
    without_reweight = SelectionSettings(name="belief")
    assert candidate.weight(without_reweight) == pytest.approx(factor)
    with_reweight = SelectionSettings(name="belief", reweight=10.0)
    assert candidate.weight(with_reweight) == pytest.approx(2 * factor)
