"""Kalman filter of pass rates p, in the variable ψ = arcsin √p.

A belief is a Gaussian of ψ. In this variable the observation noise does not depend on p. All
functions are pure. Predictions are about one prompt, observations about the prompts of a step.
Variances are of ψ, in rad².
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

MAX_ANGLE = math.pi / 2  # ψ of p = 1
MAX_VARIANCE = 0.25  # variance of an uninformative belief


def predict(
    mean: float, variance: float, steps: float, drift: float, process_noise: float
) -> tuple[float, float]:
    """Predict the belief about one prompt `steps` steps later.

    The mean becomes μ + v Δt sin 2μ within [0, π/2], the variance V + q Δt up to 0.25.

    drift: v, a quarter of the change per step of every pass rate's logit
    (dψ/dt = sin 2ψ / 4 · d logit p / dt).
    process_noise: q in rad² per step, see `ProcessNoise`.
    """
    new_mean = min(max(mean + drift * steps * math.sin(2 * mean), 0.0), MAX_ANGLE)
    new_variance = min(variance + process_noise * steps, MAX_VARIANCE)
    return new_mean, max(variance, new_variance)


def observation(correct: Floats, samples: Floats, is_mixed: Mask) -> tuple[Floats, Floats]:
    """Return the observed ψ of judged groups and its noise variance.

    A mixed group gives z = arcsin √((k + 3/8) / (n + 3/4)) and R = 1 / (4n + 2). Another group
    gives z = 0 or π/2, whichever is nearer, and R = 1 / (2n).

    correct: k, sum of the group's raw correctness, each within [0, 1].
    samples: n, number of the group's verdicts.
    """
    share = (correct + 0.375) / (samples + 0.75)
    mixed_angle = np.arcsin(np.sqrt(share))
    end_angle = np.where(2 * correct < samples, 0.0, MAX_ANGLE)
    angle = np.where(is_mixed, mixed_angle, end_angle)
    noise = np.where(is_mixed, 1 / (4 * samples + 2), 1 / (2 * samples))
    return angle, noise


def update(mean: Floats, variance: Floats, angle: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """Update a belief by an observation.

    With the gain K = V / (V + R), the mean becomes μ + K (z - μ) within [0, π/2], the variance
    (1 - K) V.

    angle, noise: z and R, see `observation`.
    """
    gain = variance / (variance + noise)
    return np.clip(mean + gain * (angle - mean), 0.0, MAX_ANGLE), (1 - gain) * variance


def all_correct_probability(mean: float, variance: float, samples: int) -> float:
    """Return the probability that N rollouts of one prompt are all correct.

    exp(-N (π/2 - μ)² / a) / √a with a = 1 + 2 N V. This is the mean of exp(-N (π/2 - ψ)²), which
    is close to p^N, over the belief.
    """
    spread = 1 + 2 * samples * variance
    distance = MAX_ANGLE - mean
    return math.exp(-samples * distance * distance / spread) / math.sqrt(spread)


def all_incorrect_probability(mean: float, variance: float, samples: int) -> float:
    """Return the probability that N rollouts of one prompt are all incorrect, as above."""
    return all_correct_probability(MAX_ANGLE - mean, variance, samples)
