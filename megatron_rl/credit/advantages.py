"""Advantages of one group's rollouts, computed from raw scores and penalties."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_MAX_STRENGTH = 0.5
_MIN_SPREAD = 0.25
# The largest advantage of an answer in a tied group: small beside the advantages of mixed groups,
# because a tied group says nothing about correctness.
TIED_SCALE = 0.1


def group_relative(rewards: Floats, *, normalize_std: bool = True, eps: float = 1e-6) -> Floats:
    """Compute the advantages of one group, float64 [G] -> float64 [G] with G >= 2.

    A_i = (R_i - mean(R)) / (std(R) + eps)                   GRPO, arXiv 2402.03300, section 4.1.2

    std is the sample standard deviation (divided by G - 1), as in the common open implementations.
    With 8 rollouts it is 7 % above the population's. normalize_std=False skips the division
    (Dr. GRPO, arXiv 2503.20783, section 3.1). Equal rewards give exactly zero.

    Raises ValueError if `rewards` has another shape.
    """
    if rewards.ndim != 1 or len(rewards) < 2:
        raise ValueError(f"rewards have shape {rewards.shape}; a group needs [G] with G >= 2")
    if rewards.min() == rewards.max():
        # The mean of equal rewards may differ from them in the last bit.
        return np.zeros_like(rewards)
    differences = rewards - rewards.mean()
    return differences / (rewards.std(ddof=1) + eps) if normalize_std else differences


def shape_advantages(
    advantages: Floats, scores: Floats, penalties: Floats, *, strength: float
) -> Floats:
    """Lower advantages by penalties, float64 [G], and keep all signs and the order of the scores.

    A'_i = A_i - η x_i min(|A_i|, A_i - A_below)            x_i in [0, 1], η = strength in [0, 1/2]

    A_below is the advantage of the next lower score in the group, if there is one. If a score is
    either correct or incorrect, this is A (1 - η x) for correct answers and A (1 + η x) for
    incorrect ones, so a penalty changes an advantage by a share of at most η. If there are scores
    in between, the penalty is at most η times the distance to the next lower advantage. An answer
    with a higher score therefore never falls below one with a lower score
    (tests/credit/test_shaping.py::test_shaping_keeps_signs_and_order).

    Raises ValueError if `strength` is out of range.
    """
    if not 0.0 <= strength <= _MAX_STRENGTH:
        raise ValueError(
            f"strength={strength}: must be from 0 to {_MAX_STRENGTH}, or penalties could reorder "
            "answers"
        )
    _, first_index, level_of_score = np.unique(scores, return_index=True, return_inverse=True)
    # Scores that differ in the last bits can have equal advantages. Then their distance is 0.
    levels = advantages[first_index]
    steps = np.minimum(np.abs(levels), np.diff(levels, prepend=-np.inf))
    reduction = strength * np.clip(penalties, 0.0, 1.0) * steps[level_of_score]
    return np.asarray(advantages - reduction)


def tied_advantages(penalties: Floats) -> Floats:
    """Compute small advantages of answers with equal scores, float64 [G].

    A_i = λ clip((s_i - mean(s)) / max(std(s), 1/4), ±1),  s = -penalty, λ = TIED_SCALE

    The lower the penalty, the higher the advantage. A standard deviation below 1/4 is not
    normalised to 1, so small differences stay small.
    """
    merits = -penalties
    spread = max(float(merits.std(ddof=1)), _MIN_SPREAD)
    return np.asarray(TIED_SCALE * np.clip((merits - merits.mean()) / spread, -1.0, 1.0))
