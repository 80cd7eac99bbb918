"""What is believed of a pass rate p, as a Gaussian of ψ = arcsin √p: there the noise of counting
does not depend on p.

All functions are pure and work on arrays; variances are those of ψ, in rad².
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

HIGHEST = np.pi / 2  # ψ of p = 1
WIDEST = 0.25  # nothing is known


def predicted(
    mean: Floats, variance: Floats, steps: Floats, drift: float, growth: Floats | float
) -> tuple[Floats, Floats]:
    """The belief `steps` steps later: μ + v Δt sin 2μ within [0, π/2], V + q Δt up to 0.25.

    growth: q, see `ProcessNoise`. drift: v, a quarter of what the logit of every pass rate gains
    per step (dψ/dt = sin 2ψ / 4 · d logit p / dt).
    """
    moved = np.clip(mean + drift * steps * np.sin(2 * mean), 0.0, HIGHEST)
    return moved, np.maximum(variance, np.minimum(variance + growth * steps, WIDEST))


def observation(
    right: Floats, samples: Floats, mixed: npt.NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """What a judged group says of ψ, and the variance of that.

    right: the sum of the raw correctness of its `samples` verdicts, each within [0, 1]. A mixed
    group says z = arcsin √((k + 3/8) / (n + 3/4)), R = 1 / (4n + 2); a flat one z = 0 or π/2,
    whichever is nearer, R = 1 / (2n).
    """
    share = (right + 0.375) / (samples + 0.75)
    seen = np.where(mixed, np.arcsin(np.sqrt(share)), np.where(2 * right < samples, 0.0, HIGHEST))
    return seen, np.where(mixed, 1 / (4 * samples + 2), 1 / (2 * samples))


def updated(mean: Floats, variance: Floats, seen: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """The belief after an observation: K = V / (V + R), μ + K (z − μ) within [0, π/2], (1 − K) V."""
    gain = variance / (variance + noise)
    return np.clip(mean + gain * (seen - mean), 0.0, HIGHEST), (1 - gain) * variance


def chance_of_all_right(mean: Floats, variance: Floats, samples: int) -> Floats:
    """The probability that `samples` rollouts are all right: exp(−N (π/2 − μ)² / a) / √a, a = 1 + 2
    N V.

    The mean of exp(−N (π/2 − ψ)²), which is close to p^N, over the belief.
    """
    spread = 1 + 2 * samples * variance
    away = HIGHEST - mean
    return np.clip(np.exp(-samples * away * away / spread) / np.sqrt(spread), 0.0, 1.0)


def chance_of_mixed(mean: Floats, variance: Floats, samples: int) -> Floats:
    """The probability that `samples` rollouts are neither all right nor all wrong.

    u = 1 − [exp(−N μ² / a) + exp(−N (π/2 − μ)² / a)] / √a, a = 1 + 2 N V: the mean of 1 − exp(−N
    ψ²) − exp(−N (π/2 − ψ)²), which is close to 1 − (1 − p)^N − p^N, over the belief.
    """
    spread = 1 + 2 * samples * variance
    wrong, right = (np.exp(-samples * d * d / spread) for d in (mean, HIGHEST - mean))
    return np.clip(1 - (wrong + right) / np.sqrt(spread), 0.0, 1.0)
