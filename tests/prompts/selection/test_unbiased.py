"""Screen-and-extend with its weights has the expected gradient of groups drawn in full; without
them it has another.
"""

from collections.abc import Callable
from math import comb

import numpy as np
import pytest

from megatron_rl.credit.advantages import group_relative
from megatron_rl.prompts.selection.importance_weights import (
    pilot_mixed_probability,
    pilot_unsolved_probability,
)

N, PILOT = 8, 4
PASS_RATES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95])


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """Of groups, float64 [G, N]; those of equal rewards are 0, as in `group_relative`."""
    centred = rewards - rewards.mean(-1, keepdims=True)
    return centred / (rewards.std(-1, ddof=1, keepdims=True) + 1e-6)


def coefficient(
    p: float,
    probed: bool,
    weighted: bool,
    going_on: Callable[[list[float], int], float] = pilot_mixed_probability,
) -> float:
    """c(p) of E[sum_i A_i grad log pi_i] = c(p) grad p, by enumeration over k and over all pilots
    of each k.
    """
    total = 0.0
    for k in range(1, N):
        scores = [1.0] * k + [0.0] * (N - k)
        advantages = group_relative(np.array(scores))
        # grad log pi of a right sample is grad p / p in expectation, of a wrong one -grad p / (1 -
        # p)
        value = advantages[:k].sum() / p - advantages[k:].sum() / (1 - p)
        chance = comb(N, k) * p**k * (1 - p) ** (N - k)
        mixed = going_on(scores, PILOT)
        total += chance * value * ((mixed if probed else 1.0) * (1 / mixed if weighted else 1.0))
    return total


@pytest.mark.parametrize("p", PASS_RATES)
def test_every_pass_rate_counts_as_much_as_with_full_groups(p: float) -> None:
    full = coefficient(p, probed=False, weighted=False)
    assert coefficient(p, probed=True, weighted=True) == pytest.approx(full, rel=1e-12)
    raw = coefficient(p, probed=True, weighted=False) / full
    assert raw < 0.95, "without weights hard and easy prompts count less"
    if p == 0.1:
        assert raw == pytest.approx(0.63, abs=0.005)  # the known value


@pytest.mark.parametrize("p", PASS_RATES)
def test_so_it_does_where_only_solved_pilots_stop(p: float) -> None:
    full = coefficient(p, probed=False, weighted=False)
    assert coefficient(p, True, True, pilot_unsolved_probability) == pytest.approx(full, rel=1e-12)
    raw = coefficient(p, True, False, pilot_unsolved_probability) / full
    assert raw < 0.999 if p >= 0.2 else raw > 0.98


class TabularPolicy:
    """A softmax over six answers of each prompt; the first ones are right. Gradients are of the
    logits.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.right = np.arange(6) < rng.integers(1, 4, len(PASS_RATES))[:, None]
        mass = rng.uniform(0.2, 1, (len(PASS_RATES), 6))
        for side, share in (
            (self.right, PASS_RATES[:, None]),
            (~self.right, 1 - PASS_RATES[:, None]),
        ):
            mass = np.where(
                side, mass / np.where(side, mass, 0).sum(1, keepdims=True) * share, mass
            )
        self.probabilities = mass

    def gradients(self, draws: int, seed: int) -> dict[str, np.ndarray]:
        """Means over `draws` groups of every prompt, of the same samples each: [prompts * answers]."""
        rng, sums = np.random.default_rng(seed), dict[str, list[np.ndarray]]()
        for p, right in zip(self.probabilities, self.right, strict=True):
            answers = rng.choice(6, (draws, N), p=p)
            rewards = right[answers].astype(np.float64)
            k, pilot = rewards.sum(1).astype(int), rewards[:, :PILOT].sum(1)
            extended = (pilot > 0) & (pilot < PILOT)
            weight = np.array(
                [
                    0.0,
                    *(
                        1 / pilot_mixed_probability([1.0] * j + [0.0] * (N - j), PILOT)
                        for j in range(1, N)
                    ),
                    0.0,
                ]
            )[k]
            for name, factor in (
                ("full", np.ones(draws)),
                ("weighted", extended * weight),
                ("raw", extended * 1.0),
            ):
                scaled = advantages_of(rewards) * factor[:, None]
                # sum_i A_i (onehot_i - p), and the advantages of a group add up to 0
                per_answer = np.bincount(answers.ravel(), weights=scaled.ravel(), minlength=6)
                sums.setdefault(name, []).append((per_answer - scaled.sum() * p) / draws)
        return {name: np.concatenate(parts) for name, parts in sums.items()}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_the_expected_gradient_of_a_policy_is_that_of_full_groups() -> None:
    gradients = TabularPolicy(seed=1).gradients(draws=40_000, seed=2)
    full, weighted, raw = (gradients[name] for name in ("full", "weighted", "raw"))
    assert cosine(full, weighted) >= 0.999
    assert np.linalg.norm(weighted) / np.linalg.norm(full) == pytest.approx(1, abs=0.01)
    assert np.linalg.norm(raw) / np.linalg.norm(full) < 0.9 and cosine(full, raw) < 0.9985
