"""Extended probes with importance weights have the expected gradient of whole groups."""

from collections.abc import Callable
from math import comb

import numpy as np
import pytest

from megatron_rl.credit.advantages import group_relative
from megatron_rl.prompts.selection.importance_weights import (
    pilot_mixed_probability,
    pilot_not_all_correct_probability,
)

N = 8
PILOT = 4
PASS_RATES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95])
ExtensionProbability = Callable[[list[float], int], float]


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """Advantages of many groups, float64 [G, N], as by `group_relative`."""
    differences = rewards - rewards.mean(-1, keepdims=True)
    return differences / (rewards.std(-1, ddof=1, keepdims=True) + 1e-6)


def scores_of(num_correct: int) -> list[float]:
    return [1.0] * num_correct + [0.0] * (N - num_correct)


def coefficient(p: float, factor: Callable[[list[float]], float]) -> float:
    """c(p) of E[sum_i A_i grad log pi_i] = c(p) grad p, by enumeration of all groups.

    factor: expected factor of a group's advantages over all of its pilots.
    """
    total = 0.0
    for k in range(1, N):
        scores = scores_of(k)
        advantages = group_relative(np.array(scores))
        # The expectation of grad log pi is grad p / p for a correct sample and -grad p / (1 - p)
        # for an incorrect one.
        value = advantages[:k].sum() / p - advantages[k:].sum() / (1 - p)
        probability = comb(N, k) * p**k * (1 - p) ** (N - k)
        total += probability * value * factor(scores)
    return total


def ratios(p: float, extension_probability: ExtensionProbability) -> tuple[float, float]:
    """Coefficients of probes with and without weights, divided by whole groups'."""
    whole_groups = coefficient(p, lambda scores: 1.0)

    def weighted_factor(scores: list[float]) -> float:
        probability = extension_probability(scores, PILOT)
        return probability * (1 / probability)

    with_weights = coefficient(p, weighted_factor)
    without_weights = coefficient(p, lambda scores: extension_probability(scores, PILOT))
    return with_weights / whole_groups, without_weights / whole_groups


@pytest.mark.parametrize("p", PASS_RATES)
def test_extended_mixed_pilots_are_unbiased_with_weights_only(p: float) -> None:
    with_weights, without_weights = ratios(p, pilot_mixed_probability)
    assert with_weights == pytest.approx(1, rel=1e-12)
    assert without_weights < 0.95
    if p == 0.1:
        assert without_weights == pytest.approx(0.63, abs=0.005)


@pytest.mark.parametrize("p", PASS_RATES)
def test_pilots_that_stop_if_all_correct_are_unbiased_with_weights_only(p: float) -> None:
    with_weights, without_weights = ratios(p, pilot_not_all_correct_probability)
    assert with_weights == pytest.approx(1, rel=1e-12)
    if p >= 0.2:
        assert without_weights < 0.999
    else:
        assert without_weights > 0.98


def extension_weights(rewards: np.ndarray) -> np.ndarray:
    """Weights of extended groups, 0 for groups that stop after their pilot. float64 [G]."""
    weight_by_count = np.zeros(N + 1)
    for k in range(1, N):
        weight_by_count[k] = 1 / pilot_mixed_probability(scores_of(k), PILOT)
    pilot_correct = rewards[:, :PILOT].sum(1)
    is_extended = (pilot_correct > 0) & (pilot_correct < PILOT)
    return is_extended * weight_by_count[rewards.sum(1).astype(int)]


class TabularPolicy:
    """Softmax over six answers of each prompt. The first answers are correct."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.is_correct = np.arange(6) < rng.integers(1, 4, len(PASS_RATES))[:, None]
        weights = rng.uniform(0.2, 1, (len(PASS_RATES), 6))
        correct = np.where(self.is_correct, weights, 0)
        incorrect = np.where(self.is_correct, 0, weights)
        correct *= PASS_RATES[:, None] / correct.sum(1, keepdims=True)
        incorrect *= (1 - PASS_RATES[:, None]) / incorrect.sum(1, keepdims=True)
        self.probabilities = correct + incorrect

    def gradients(self, num_groups: int, seed: int) -> dict[str, np.ndarray]:
        """Mean gradients of the logits over the same groups, float64 [prompts * answers]."""
        rng = np.random.default_rng(seed)
        parts: dict[str, list[np.ndarray]] = {"whole": [], "with_weights": [], "no_weights": []}
        for probabilities, is_correct in zip(self.probabilities, self.is_correct, strict=True):
            answers = rng.choice(6, (num_groups, N), p=probabilities)
            rewards = is_correct[answers].astype(np.float64)
            weights = extension_weights(rewards)
            factors = {
                "whole": np.ones(num_groups),
                "with_weights": weights,
                "no_weights": (weights > 0) * 1.0,
            }
            for name, factor in factors.items():
                advantages = advantages_of(rewards) * factor[:, None]
                parts[name].append(logit_gradient(answers, advantages, probabilities))
        return {name: np.concatenate(gradients) for name, gradients in parts.items()}


def logit_gradient(
    answers: np.ndarray, advantages: np.ndarray, probabilities: np.ndarray
) -> np.ndarray:
    """Mean of sum_i A_i (onehot_i - p) over groups, float64 [answers]."""
    per_answer = np.bincount(answers.ravel(), weights=advantages.ravel(), minlength=6)
    return (per_answer - advantages.sum() * probabilities) / len(answers)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.slow
def test_expected_policy_gradient_is_that_of_whole_groups() -> None:
    gradients = TabularPolicy(seed=1).gradients(num_groups=40_000, seed=2)
    whole = gradients["whole"]
    with_weights = gradients["with_weights"]
    no_weights = gradients["no_weights"]
    assert cosine(whole, with_weights) >= 0.999
    ratio = np.linalg.norm(with_weights) / np.linalg.norm(whole)
    assert ratio == pytest.approx(1, abs=0.01)
    assert np.linalg.norm(no_weights) / np.linalg.norm(whole) < 0.9
    assert cosine(whole, no_weights) < 0.9985
