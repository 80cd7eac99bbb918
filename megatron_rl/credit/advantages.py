"""Group-relative advantages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_rl.contracts.group import Group, RolloutRef

Floats = npt.NDArray[np.float64]


def group_relative(rewards: Floats, *, normalize_std: bool = True, eps: float = 1e-6) -> Floats:
    """Advantages of one group's rewards, float64 [G] -> float64 [G], G >= 2.

    A_i = (R_i - mean(R)) / (std(R) + eps)                   GRPO, arXiv 2402.03300, section 4.1.2

    std is the sample standard deviation (divided by G - 1), as in the common open implementations; with 8 samples it is
    7 % above the population's. normalize_std False leaves out the division (Dr. GRPO, arXiv 2503.20783, section 3.1).
    """
    if rewards.ndim != 1 or len(rewards) < 2:
        raise ValueError(f"rewards have shape {rewards.shape}; a group needs [G] with G >= 2")
    if rewards.min() == rewards.max():
        return np.zeros_like(rewards)  # the mean of equal rewards may differ from them in the last bit
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + eps) if normalize_std else centred


def assign_advantages(
    groups: Sequence[Group], *, normalize_std: bool = True, eps: float = 1e-6
) -> tuple[list[RolloutRef], list[float]]:
    """Samples with a verdict and their advantages, in the groups' order; groups with fewer than two are left out."""
    samples: list[RolloutRef] = []
    advantages: list[float] = []
    for group in groups:
        judged = [s for s in group.samples if s.verdict.reward is not None]
        if len(judged) < 2:
            continue
        rewards = np.array([s.verdict.reward for s in judged], np.float64)
        samples.extend(judged)
        advantages.extend(group_relative(rewards, normalize_std=normalize_std, eps=eps).tolist())
    return samples, advantages


def permute_rewards(groups: Sequence[Group], seed: int) -> list[Group]:
    """Shuffle the verdicts among all samples of the batch that have one: a control in which nothing can be learnt.

    The batch keeps its rewards and its samples without a verdict; which response earned which reward is lost.
    """
    verdicts = [s.verdict for group in groups for s in group.samples if s.verdict.reward is not None]
    random.Random(seed).shuffle(verdicts)
    remaining = iter(verdicts)
    return [
        msgspec.structs.replace(
            group,
            samples=tuple(
                msgspec.structs.replace(s, verdict=next(remaining)) if s.verdict.reward is not None else s
                for s in group.samples
            ),
        )
        for group in groups
    ]
