"""Beliefs about each prompt's pass rate: a Kalman filter with a row for each prompt.

Saved and restored beliefs continue bit for bit
(tests/prompts/selection/beliefs/test_beliefs.py::test_restored_beliefs_continue_bit_for_bit).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_rl.contracts.belief_state import BEFORE_FIRST_STEP, BeliefState
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.pass_rates import PassRate
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.selection.beliefs.arcsine import (
    MAX_VARIANCE,
    Floats,
    Mask,
    predict,
    update,
)
from megatron_rl.prompts.selection.beliefs.belief_table import BeliefTable
from megatron_rl.prompts.selection.beliefs.drift import SharedDrift
from megatron_rl.prompts.selection.beliefs.observations import Observations, observe_groups
from megatron_rl.prompts.selection.beliefs.pass_rate_prior import PassRatePrior
from megatron_rl.prompts.selection.beliefs.process_noise import ProcessNoise, excess_variance
from megatron_rl.prompts.selection.beliefs.strata import Strata, Stratum, stratum_of

_Estimate = tuple[float, float]


@dataclass(frozen=True)
class _Predictions:
    """Beliefs about the prompts of a step's groups, before the groups are observed. All are [n].

    strata: strata of the prompts.
    rows: rows in the table.
    is_first: True for prompts without an earlier group in this run.
    old_means, old_variances: belief as of the previous group, or the initial belief.
    steps: steps since the previous group, 0 for first groups.
    means, variances: belief in the step.
    """

    strata: Sequence[Stratum]
    rows: npt.NDArray[np.intp]
    is_first: Mask
    old_means: Floats
    old_variances: Floats
    steps: Floats
    means: Floats
    variances: Floats


class Beliefs:
    """Belief about the pass rate of each prompt that was ever offered.

    The number of correct rollouts is the sum of the raw correctness, each clipped to [0, 1], so
    half of the tests passed counts as half a correct answer. `kind_of` decides which groups are
    mixed. A group with fewer than two verdicts, or without any correctness, is no observation, but
    it counts as a group of its prompt.

    A prompt without a group starts from its given pass rate, or from its stratum.

    pool: ids of the prompts that can be offered. Beliefs about other prompts are kept for later
    runs.
    rates: given pass rates by prompt id, from before the first step.
    """

    def __init__(
        self, pool: Collection[str] = (), rates: Mapping[str, PassRate] | None = None
    ) -> None:
        self._table = BeliefTable(pool)
        self._strata = Strata()
        self._drift = SharedDrift()
        self._process_noise = ProcessNoise()
        self._pass_rate_prior = PassRatePrior(rates or {})
        self._clock = 0  # last observed step

    def __len__(self) -> int:
        return len(self._table)

    @property
    def drift(self) -> float:
        """Drift v that all prompts share, in rad per step."""
        return self._drift.rate

    @property
    def process_noise(self) -> float:
        """Process noise q of all strata together, in rad² per step."""
        return self._process_noise.shared_rate

    def stratum_process_noise(self, stratum: Stratum) -> float:
        """Return the process noise q of a stratum, in rad² per step."""
        return self._process_noise.rate(stratum)

    @property
    def num_outside_pool(self) -> int:
        """Number of beliefs about prompts that are not in the pool."""
        return self._table.num_outside_pool

    def row(self, prompt: Prompt) -> int:
        """Return the row of a prompt. A new prompt gets a row."""
        return self._table.find_or_add(prompt.id)

    def declines(self, row: int) -> int:
        """Return how often a prompt was offered and declined since its last group."""
        return int(self._table.declines[row])

    def count_decline(self, row: int) -> None:
        """Count an offer that a step has declined."""
        self._table.declines[row] += 1

    def max_declines(self) -> int:
        """Return the largest number of `declines` of the pool."""
        return self._table.max_declines()

    def estimate(self, prompt: Prompt, row: int, step: int) -> _Estimate:
        """Return the mean and the variance of ψ of a prompt in `step`."""
        table = self._table
        last_step = int(table.last_group_steps[row])
        if last_step <= BEFORE_FIRST_STEP:
            return self.initial_belief(prompt, step)
        return predict(
            float(table.means[row]),
            float(table.variances[row]),
            step - last_step,
            self.drift,
            self.stratum_process_noise(stratum_of(prompt)),
        )

    def stratum_prior(self, stratum: Stratum) -> _Estimate:
        """Return the mean and the variance of ψ of a prompt without a group and without a rate."""
        return self._strata.prior(stratum)

    def external_estimate(self, prompt: Prompt, step: int) -> _Estimate | None:
        """Return an estimate from outside of this run, or None without one.

        It is the belief of another run or the given pass rate, predicted for `step` as if it
        belonged to this policy. The result is the mean and the variance of ψ.
        """
        row = self._table.find(prompt.id)
        estimate: _Estimate | None
        if row is not None and self._table.last_group_steps[row] == BEFORE_FIRST_STEP:
            estimate = (float(self._table.means[row]), float(self._table.variances[row]))
        else:
            estimate = self._pass_rate_prior.estimate(prompt.id)
        if estimate is None:
            return None
        process_noise = self.stratum_process_noise(stratum_of(prompt))
        return predict(*estimate, step, self.drift, process_noise)

    def initial_belief(self, prompt: Prompt, step: int) -> _Estimate:
        """Return the mean and the variance of ψ in `step` of a prompt without a group."""
        estimate = self.external_estimate(prompt, step)
        if estimate is None:
            return self.stratum_prior(stratum_of(prompt))
        mean, variance = estimate
        inflated_variance = min(variance + self._pass_rate_prior.extra_variance, MAX_VARIANCE)
        return mean, max(variance, inflated_variance)

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Learn from a step's groups, at most one of each prompt.

        Their order must not depend on their arrival.
        """
        predictions = self._predict(step, groups)
        observations = observe_groups(groups)
        is_first = predictions.is_first & observations.is_informative
        # Estimates by the parameters before this step
        external_estimates = {
            index: self.external_estimate(groups[index].prompt, step)
            for index in np.flatnonzero(is_first).tolist()
        }
        self._decay(step)
        self._learn_dynamics(predictions, observations)
        for index, estimate in external_estimates.items():
            self._learn_initial_beliefs(predictions.strata[index], observations, index, estimate)
        self._update_rows(step, predictions, observations)
        self._clock = step

    def inflate_variance(self) -> None:
        """Make beliefs uninformative, and external estimates until first groups confirm them."""
        has_group = self._table.last_group_steps > BEFORE_FIRST_STEP
        self._table.variances[has_group] = MAX_VARIANCE
        self._pass_rate_prior.inflate_variance()

    def current_estimates(self) -> tuple[Floats, Floats]:
        """Return means and variances of ψ after the last step, in the order of the rows.

        Another run can start from them.
        """
        count = len(self)
        last_group_steps = self._table.last_group_steps[:count]
        means, variances = self._predict_rows(
            self._table.means[:count].astype(np.float64),
            self._table.variances[:count].astype(np.float64),
            np.maximum(self._clock - last_group_steps, 0),
            np.full(count, self.process_noise),
        )
        inflated_variances = np.where(
            last_group_steps == BEFORE_FIRST_STEP,
            np.minimum(variances + self._pass_rate_prior.extra_variance, MAX_VARIANCE),
            variances,
        )
        return means, np.maximum(inflated_variances, variances)

    def state(self, window: Sequence[tuple[float, float, float]] = ()) -> BeliefState:
        """Return the state that `restore` takes. window: see `Calibration`."""
        table = self._table
        count = len(self)
        return BeliefState(
            prompts=table.ids,
            means=table.means[:count].tobytes(),
            variances=table.variances[:count].tobytes(),
            last_group_steps=table.last_group_steps[:count].tobytes(),
            declines=table.declines[:count].tobytes(),
            strata=self._strata.state(),
            drift=self._drift.state(),
            clock=self._clock,
            window=tuple(window),
            process_noise=self._process_noise.state(),
            pass_rate_prior=self._pass_rate_prior.state(),
        )

    def restore(self, state: BeliefState) -> None:
        """Replace all beliefs by saved ones. Raises `PromptDataError` if they are damaged."""
        if problem := state.problem():
            raise PromptDataError(
                f"run.resume: the checkpoint's beliefs are damaged ({problem}). Give another "
                "checkpoint"
            )
        self._table.restore(
            state.prompts,
            state.means,
            state.variances,
            state.last_group_steps,
            state.declines,
        )
        self._strata.restore(state.strata)
        self._drift.restore(state.drift)
        self._process_noise.restore(state.process_noise)
        self._pass_rate_prior.restore(state.pass_rate_prior)
        self._clock = state.clock

    def _predict(self, step: int, groups: Sequence[Group]) -> _Predictions:
        table = self._table
        rows = np.array([self.row(group.prompt) for group in groups], np.intp)
        is_first = table.last_group_steps[rows] <= BEFORE_FIRST_STEP
        old_means = table.means[rows].astype(np.float64)
        old_variances = table.variances[rows].astype(np.float64)
        for index in np.flatnonzero(is_first).tolist():
            mean, variance = self.initial_belief(groups[index].prompt, step)
            old_means[index] = mean
            old_variances[index] = variance
        steps = np.where(is_first, 0, step - table.last_group_steps[rows]).astype(np.float64)
        strata = [stratum_of(group.prompt) for group in groups]
        process_noise = np.array([self.stratum_process_noise(stratum) for stratum in strata])
        means, variances = self._predict_rows(old_means, old_variances, steps, process_noise)
        return _Predictions(
            strata, rows, is_first, old_means, old_variances, steps, means, variances
        )

    def _predict_rows(
        self, means: Floats, variances: Floats, steps: npt.NDArray[Any], process_noise: Floats
    ) -> tuple[Floats, Floats]:
        """Predict beliefs. All arguments and results are [n]."""
        columns = (means.tolist(), variances.tolist(), steps.tolist(), process_noise.tolist())
        predictions = [
            predict(mean, variance, count, self.drift, noise)
            for mean, variance, count, noise in zip(*columns, strict=True)
        ]
        new_means, new_variances = np.array(predictions, np.float64).reshape(-1, 2).T
        return new_means, new_variances

    def _decay(self, step: int) -> None:
        """Reduce the weight of what all learned parameters were estimated from."""
        steps = step - self._clock
        self._drift.decay(steps)
        self._strata.decay(steps)
        self._process_noise.decay(steps)
        self._pass_rate_prior.decay(steps)

    def _learn_dynamics(self, predictions: _Predictions, observations: Observations) -> None:
        """Estimate drift and process noise from prompts with an earlier group in this run."""
        variances = predictions.variances + observations.noise
        self._drift.learn(
            observations.is_informative & ~predictions.is_first,
            predictions.old_means,
            predictions.steps,
            observations.angles,
            variances,
        )
        excess = excess_variance(
            observations.angles - predictions.means,
            predictions.old_variances + observations.noise,
            observations.is_mixed,
        )
        steps = np.where(observations.is_informative, predictions.steps, 0.0)
        self._process_noise.learn(predictions.strata, steps, excess, variances)

    def _learn_initial_beliefs(
        self,
        stratum: Stratum,
        observations: Observations,
        index: int,
        external_estimate: _Estimate | None,
    ) -> None:
        """Estimate the stratum's prior, and how reliable external estimates are."""
        angle = observations.angles[index]
        noise = observations.noise[index]
        self._strata.add(stratum, float(angle), float(noise))
        if external_estimate is None:
            return
        mean, variance = external_estimate
        excess = excess_variance(angle - mean, variance + noise, observations.is_mixed[index])
        self._pass_rate_prior.learn(float(excess))

    def _update_rows(
        self, step: int, predictions: _Predictions, observations: Observations
    ) -> None:
        table = self._table
        rows = predictions.rows
        means, variances = update(
            predictions.means, predictions.variances, observations.angles, observations.noise
        )
        is_informative = observations.is_informative
        table.means[rows] = np.where(is_informative, means, predictions.means)
        table.variances[rows] = np.where(is_informative, variances, predictions.variances)
        table.last_group_steps[rows] = step
        table.declines[rows] = 0
