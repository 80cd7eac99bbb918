"""Observations of a step's groups, for the Kalman filter of pass rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.contracts.group import Group
from megatron_rl.credit.group_kinds import GroupKind, ScoredRollouts, kind_of
from megatron_rl.prompts.selection.beliefs.arcsine import Floats, Mask, observation

# With fewer verdicts a group is no observation.
_MIN_VERDICTS = 2


@dataclass(frozen=True)
class Observations:
    """Observed ψ of a step's groups. All arrays are [n].

    is_informative: True for groups with raw correctness and enough verdicts.
    is_mixed: True for mixed groups.
    angles, noise: observed ψ and its noise variance.
    """

    is_informative: Mask
    is_mixed: Mask
    angles: Floats
    noise: Floats


def observe_groups(groups: Sequence[Group]) -> Observations:
    """Compute the observation of each group."""
    scored_groups = [ScoredRollouts.from_group(group) for group in groups]
    is_informative = [
        scored_rollouts.has_correctness and len(scored_rollouts.rollouts) >= _MIN_VERDICTS
        for scored_rollouts in scored_groups
    ]
    scores = [np.clip(scored_rollouts.scores, 0.0, 1.0) for scored_rollouts in scored_groups]
    correct = np.array([np.sum(group_scores) for group_scores in scores], np.float64)
    samples = np.array([len(group_scores) for group_scores in scores], np.float64)
    is_mixed = np.array([kind_of(group) is GroupKind.MIXED for group in groups], np.bool_)
    angles, noise = observation(correct, np.maximum(samples, 1), is_mixed)
    return Observations(np.array(is_informative, np.bool_), is_mixed, angles, noise)
