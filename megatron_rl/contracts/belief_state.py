"""Belief about each prompt's pass rate, as a checkpoint stores it."""

from __future__ import annotations

import math

import msgspec
import numpy as np

# Values of `BeliefState.last_group_steps` for prompts without a group in this run
NEVER_SAMPLED = -1
BEFORE_FIRST_STEP = 0  # sampled only by an earlier run; the first step of this one is 1


class BeliefState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run's beliefs between two steps.

    prompts: prompt ids, in the order of the arrays' rows.
    means, variances: float32 [n], of the arcsine-transformed pass rate.
    last_group_steps: int32 [n], the step of a prompt's last group, or `NEVER_SAMPLED` or
    `BEFORE_FIRST_STEP`.
    declines: int32 [n], how often a prompt was offered and declined since its last group. Empty in
    states that did not count them: the counts then start at 0.
    strata: (source, tag, moments), the stratum of all prompts first.
    drift: the two sums whose quotient is the drift that all prompts share.
    clock: the last step.
    window: (predicted, observed, groups) of the most recent steps, for the calibration metric.
    process_noise: (source, tag, two sums), ordered as `strata`; the sums estimate how fast the
    variance grows.
    pass_rate_prior: the two sums that estimate the extra variance of given pass rates.
    """

    prompts: tuple[str, ...]
    means: bytes
    variances: bytes
    last_group_steps: bytes
    strata: tuple[tuple[str, str, tuple[float, float, float, float]], ...]
    drift: tuple[float, float]
    clock: int
    declines: bytes = b""
    window: tuple[tuple[float, float, float], ...] = ()
    process_noise: tuple[tuple[str, str, tuple[float, float]], ...] = ()
    pass_rate_prior: tuple[float, float] = (0.0, 0.0)

    def problem(self) -> str:
        """Return why this state is damaged, or an empty string if it is valid."""
        count = len(self.prompts)
        arrays = [self.means, self.variances, self.last_group_steps]
        if self.declines:
            arrays.append(self.declines)
        if any(len(array) != 4 * count for array in arrays):
            return f"its arrays do not have {count} rows, one for each prompt"
        if not self.strata:
            return "it has no strata"
        if len(set(self.prompts)) != count:
            return "a prompt appears twice"
        means = np.frombuffer(self.means, np.float32)
        variances = np.frombuffer(self.variances, np.float32)
        last_group_steps = np.frombuffer(self.last_group_steps, np.int32)
        is_valid_mean = (means >= 0) & (means <= np.float32(math.pi / 2))
        is_valid_variance = (variances >= 0) & np.isfinite(variances)
        if not (is_valid_mean & is_valid_variance).all():
            return "it holds a mean or variance that is out of range"
        if (last_group_steps < NEVER_SAMPLED).any():
            return "it holds a step that is out of range"
        if (np.frombuffer(self.declines, np.int32) < 0).any():
            return "it holds a negative number of declines"
        return ""
