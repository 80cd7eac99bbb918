"""Advantages of the rollouts of one group, from their rewards."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def group_relative(rewards: Floats, *, normalize_std: bool = True, eps: float = 1e-6) -> Floats:
    """Advantages of one group's rewards, float64 [G] -> float64 [G], G >= 2. Equal rewards give exactly zero.

    A_i = (R_i - mean(R)) / (std(R) + eps)                   GRPO, arXiv 2402.03300, section 4.1.2

    std is the sample standard deviation (divided by G - 1), as in the common open implementations; with 8 rollouts it
    is 7 % above the population's. normalize_std False: no division (Dr. GRPO, arXiv 2503.20783, section 3.1).
    """
    if rewards.ndim != 1 or len(rewards) < 2:
        raise ValueError(f"rewards have shape {rewards.shape}; a group needs [G] with G >= 2")
    if rewards.min() == rewards.max():
        return np.zeros_like(rewards)  # the mean of equal rewards may differ from them in the last bit
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + eps) if normalize_std else centred
