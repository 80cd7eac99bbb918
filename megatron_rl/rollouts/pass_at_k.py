"""How often one of k responses is right, without bias, with intervals clustered by question."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_rl.contracts.group import Group

_NORMAL_95 = 1.959964


def pass_at_k(samples: int, right: int, k: int) -> float:
    """1 − C(n−c, k) / C(n, k): how likely k of n responses drawn without replacement hold one of
    the c right ones.

    Unbiased for 1 − (1 − p)^k (Chen et al., arXiv 2107.03374, equation 1). 0 <= right <= samples, 1
    <= k <= samples.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def powers_up_to(samples: int) -> list[int]:
    """1, 2, 4, ... as far as `samples` responses allow."""
    return [1 << power for power in range(samples.bit_length())]


def mean_ci95(values: Sequence[float]) -> tuple[float, float]:
    """Mean over questions and half width of its 95 % interval (normal); 0 for one question, which
    tells none.
    """
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return mean, _NORMAL_95 * math.sqrt(variance / len(values))


def pass_rates(groups: Sequence[Group], samples: int) -> dict[int, tuple[float, float]]:
    """pass@k and its half width for every power of two. A response passes when its correctness is
    1; one that is lost does not."""
    right = [
        sum(rollout.verdict.correctness == 1.0 for rollout in group.rollouts) for group in groups
    ]
    return {k: mean_ci95([pass_at_k(samples, c, k) for c in right]) for k in powers_up_to(samples)}
