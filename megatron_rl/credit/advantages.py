"""Advantages of the rollouts of one group, from their raw scores and their penalties."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_MOST_STRENGTH = 0.5
_LEAST_SPREAD = 0.25


def group_relative(rewards: Floats, *, normalize_std: bool = True, eps: float = 1e-6) -> Floats:
    """Advantages of one group's rewards, float64 [G] -> float64 [G], G >= 2. Equal rewards give
    exactly zero.

    A_i = (R_i - mean(R)) / (std(R) + eps)                   GRPO, arXiv 2402.03300, section 4.1.2

    std is the sample standard deviation (divided by G - 1), as in the common open implementations;
    with 8 rollouts it is 7 % above the population's. normalize_std False: no division (Dr. GRPO,
    arXiv 2503.20783, section 3.1).
    """
    if rewards.ndim != 1 or len(rewards) < 2:
        raise ValueError(f"rewards have shape {rewards.shape}; a group needs [G] with G >= 2")
    if rewards.min() == rewards.max():
        return np.zeros_like(
            rewards
        )  # the mean of equal rewards may differ from them in the last bit
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + eps) if normalize_std else centred


def shaped(advantages: Floats, scores: Floats, penalties: Floats, *, strength: float) -> Floats:
    """Advantages that penalties lower without changing a sign or the order of two whose scores
    differ, float64 [G].

    A'_i = A_i - η x_i min(|A_i|, A_i - A_below)            x_i in [0, 1], η = strength in [0, 1/2]

    A_below is the advantage of the next lower score in the group, if any. With right and wrong
    alone that is A (1 - η x) for right answers and A (1 + η x) for wrong ones: a penalty takes or
    adds at most the share η. With more levels in between it takes at most that share of the step
    down to the next one, so a right answer stays above every less right one
    (tests/credit/test_shaping.py::test_no_reorder).
    """
    if not 0.0 <= strength <= _MOST_STRENGTH:
        raise ValueError(f"strength={strength}: from 0 to {_MOST_STRENGTH}")
    _, first, place = np.unique(scores, return_index=True, return_inverse=True)
    levels = advantages[
        first
    ]  # scores that are almost the same may have the same: no step is between them
    steps = np.minimum(np.abs(levels), np.diff(levels, prepend=-np.inf))
    return np.asarray(advantages - strength * np.clip(penalties, 0.0, 1.0) * steps[place])


def tied(penalties: Floats, *, scale: float) -> Floats:
    """Small advantages of answers that are equally right, the less penalised the better, float64
    [G].

    A_i = λ clip((s_i - mean(s)) / max(std(s), 1/4), ±1),  s = -penalty, λ = scale

    A deviation below 1/4 is not blown up: what differs little moves little.
    """
    merits = -penalties
    spread = max(float(merits.std(ddof=1)), _LEAST_SPREAD)
    return np.asarray(scale * np.clip((merits - merits.mean()) / spread, -1.0, 1.0))
