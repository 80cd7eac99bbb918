"""Estimates of pass@k with confidence intervals clustered by question."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_rl.contracts.group import Group

_NORMAL_95 = 1.959964


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate the probability that at least one of k responses is correct.

    1 - C(n - c, k) / C(n, k), with n = samples and c = correct, is the probability that k of the n
    responses, chosen without replacement, hold a correct one. It is unbiased for 1 - (1 - p)^k
    (Chen et al., arXiv 2107.03374, equation 1).

    0 <= correct <= samples, 1 <= k <= samples.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def powers_up_to(samples: int) -> list[int]:
    """Return the powers of two 1, 2, 4, ... up to `samples`."""
    return [1 << power for power in range(samples.bit_length())]


def mean_ci95(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over questions and the half width of its normal 95 % confidence interval.

    The half width is 0 for a single question, because its variance is unknown.
    """
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return mean, _NORMAL_95 * math.sqrt(variance / len(values))


def pass_rates(groups: Sequence[Group], samples: int) -> dict[int, tuple[float, float]]:
    """Return pass@k and its half width for every power of two k.

    A response passes if its correctness is 1. A rejected response does not pass. Without groups
    there are no rates.
    """
    if not groups:
        return {}
    correct_counts = [
        sum(rollout.verdict.correctness == 1.0 for rollout in group.rollouts) for group in groups
    ]
    return {
        k: mean_ci95([pass_at_k(samples, correct, k) for correct in correct_counts])
        for k in powers_up_to(samples)
    }
