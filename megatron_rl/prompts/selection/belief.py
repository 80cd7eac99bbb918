"""What a run believes of each prompt's pass rate, by prompt id.

Invariant: beliefs that were saved and restored go on bit for bit
(tests/prompts/selection/test_belief.py::test_restored_beliefs_go_on_bit_for_bit).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megatron_rl.contracts.belief_state import BEFORE_FIRST_STEP, NEVER_SAMPLED, BeliefState
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.credit.group_kinds import Kind, ScoredRollouts, kind_of
from megatron_rl.prompts.pass_rates import PassRate
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.selection.arcsine import (
    WIDEST,
    Floats,
    chance_of_all_right,
    chance_of_mixed,
    observation,
    predicted,
    updated,
)
from megatron_rl.prompts.selection.pass_rate_prior import PassRatePrior
from megatron_rl.prompts.selection.process_noise import ProcessNoise, surprise
from megatron_rl.prompts.selection.strata import Strata, Stratum, stratum_of

_KEPT = 0.98  # of the weight, per step, of what the shared drift was learnt from
_NO_DRIFT = 2.5e5  # the weight of there being none: a deviation of 0.002 rad a step
_FASTEST = 0.02  # rad a step


class Beliefs:
    """A row for each prompt that was ever offered; one that was never drawn is believed to be as
    its given pass rate says, or like its stratum.

    How many are right is the sum of the scores, each cut to [0, 1]: half of the tests passed is
    half a right answer. Which groups are mixed, `kind_of` says. A group with fewer than two
    verdicts says nothing, but was seen; so does one of a judge's rewards, which are no pass rate.
    pool: ids that can be offered; rows of others are kept for when they come back. rates: given, by
    prompt id, of the time before the first step.
    """

    def __init__(
        self, pool: Collection[str] = (), rates: Mapping[str, PassRate] | None = None
    ) -> None:
        self._pool = frozenset(pool)
        self._rows: dict[str, int] = {}
        self._named = tuple[
            str, ...
        ]()  # their ids as of the last `state`, which every step asks for
        self._means = np.zeros(0, np.float32)
        self._variances = np.zeros(0, np.float32)
        self._seen = np.zeros(
            0, np.int32
        )  # step of the last group, NEVER_SAMPLED before the first; BEFORE_FIRST_STEP: another run's
        self._since = np.zeros(
            0, np.int32
        )  # step of the last group; before the first, of the first offer
        self._aside = np.zeros(0, np.bool_)  # of no prompt of the pool
        self._strata = Strata()
        self._wander = ProcessNoise()
        self._rated = PassRatePrior(rates or {})
        self._learnt = (
            0.0,
            0.0,
        )  # Σ h e / S and Σ h² / S, discounted: what the shared drift is the quotient of
        self._clock = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def drift(self) -> float:
        """v, in rad a step: the weighted regression of z − μ on h = Δt sin 2μ, with weights 1 / (V
        + R).
        """
        moved, weight = self._learnt
        return float(np.clip(moved / (weight + _NO_DRIFT), -_FASTEST, _FASTEST))

    def row(self, prompt: Prompt, step: int) -> int:
        """Its row; a prompt without one gets one, offered first in `step`."""
        row = self._rows.get(prompt.id)
        if row is None:
            row = self._rows[prompt.id] = len(self._rows)
            if row == len(self._means):
                self._grow(max(64, 2 * row))
            self._seen[row], self._since[row], self._aside[row] = NEVER_SAMPLED, step, False
        return row

    def unseen_for(self, row: int, step: int) -> int:
        """Steps since its last group, or since its first offer."""
        return step - int(self._since[row])

    def oldest(self, step: int) -> int:
        """`unseen_for` of the prompt of the pool that has waited longest."""
        since = self._since[: len(self)][~self._aside[: len(self)]]
        return step - int(since.min()) if len(since) else 0

    @property
    def aside(self) -> int:
        """How many rows are of prompts that are not in the pool."""
        return int(self._aside[: len(self)].sum())

    def outlook(self, step: int, counts: Sequence[int]) -> MixedProbability:
        """What to expect of groups of so many rollouts in `step`."""
        return MixedProbability(self, step, self._seen > BEFORE_FIRST_STEP, tuple(counts))

    def chances(self, step: int, counts: Sequence[int], growth: float) -> Floats:
        """Of mixed groups of so many rollouts, and last of whole groups that are not all right:
        [counts + 1, rows].

        growth: of the variance per step.
        """
        steps = np.maximum(step - self._seen, 0).astype(np.float64)
        means, variances = self._means.astype(np.float64), self._variances.astype(np.float64)
        now = predicted(means, variances, steps, self.drift, growth)
        return mixed_probability_of(*now, counts)

    def growth(self, stratum: Stratum) -> float:
        """q: by how much the variance of a belief of the stratum grows per step."""
        return self._wander.of(stratum)

    @property
    def wander(self) -> float:
        """q of all strata."""
        return self._wander.shared

    def prior(self, stratum: Stratum) -> tuple[float, float]:
        """Mean and variance of ψ of what was never drawn and has no rate."""
        return self._strata.prior(stratum)

    def rated(self, prompt: Prompt, step: int) -> tuple[float, float] | None:
        """Mean and variance of ψ in `step` by another run's belief or its given rate, if that were
        this policy's; None without either."""
        row = self._rows.get(prompt.id)
        if row is not None and self._seen[row] == BEFORE_FIRST_STEP:
            given = float(self._means[row]), float(self._variances[row])
        elif (rate := self._rated.of(prompt.id)) is not None:
            given = rate
        else:
            return None
        steps, growth = np.array([float(step)]), self.growth(stratum_of(prompt))
        mean, variance = predicted(
            np.array([given[0]]), np.array([given[1]]), steps, self.drift, growth
        )
        return float(mean[0]), float(variance[0])

    def start(self, prompt: Prompt, step: int) -> tuple[float, float]:
        """Mean and variance of ψ in `step` of a prompt that was never drawn."""
        if (rated := self.rated(prompt, step)) is None:
            return self.prior(stratum_of(prompt))
        return rated[0], max(rated[1], min(rated[1] + self._rated.doubt, WIDEST))

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Learn from a step's groups, at most one of each prompt, in an order that no arrival
        decides.
        """
        rows = np.array([self.row(group.prompt, step) for group in groups], np.intp)
        first = self._seen[rows] <= BEFORE_FIRST_STEP  # in this run
        before = np.stack([self._means[rows], self._variances[rows]]).astype(np.float64)
        strata = [stratum_of(group.prompt) for group in groups]
        for place in np.flatnonzero(first).tolist():
            before[:, place] = self.start(groups[place].prompt, step)
        steps = np.where(first, 0, step - self._seen[rows]).astype(np.float64)
        growth = np.array([self.growth(stratum) for stratum in strata])
        means, variances = predicted(before[0], before[1], steps, self.drift, growth)
        kinds, found = (
            [kind_of(group) for group in groups],
            [ScoredRollouts.of(group) for group in groups],
        )
        told = np.array([each.has_truth and len(each.rollouts) >= 2 for each in found], np.bool_)
        scores = [np.clip(each.scores, 0.0, 1.0) for each in found]
        right, samples = (np.array([f(s) for s in scores], np.float64) for f in (np.sum, len))
        mixed = np.array([kind is Kind.MIXED for kind in kinds], np.bool_)
        seen, noise = observation(right, np.maximum(samples, 1), mixed)
        rated = {
            place: self.rated(groups[place].prompt, step)
            for place in np.flatnonzero(first & told).tolist()
        }
        self._learn_drift(step, told & ~first, before[0], steps, seen, variances + noise)
        for learner in (self._strata, self._wander, self._rated):
            learner.fade(step - self._clock)
        more = surprise(seen - means, before[1] + noise, mixed)
        self._wander.learn(strata, np.where(told, steps, 0.0), more, variances + noise)
        for place, given in rated.items():
            self._strata.add(strata[place], float(seen[place]), float(noise[place]))
            if given is not None:
                self._rated.learn(
                    float(surprise(seen[place] - given[0], given[1] + noise[place], mixed[place]))
                )
        after = updated(means, variances, seen, noise)
        self._means[rows] = np.where(told, after[0], means)
        self._variances[rows] = np.where(told, after[1], variances)
        self._seen[rows] = self._since[rows] = step
        self._clock = step

    def widen(self) -> None:
        """All lose their certainty; what was given before the first step, by the doubt in it."""
        self._variances[self._seen > BEFORE_FIRST_STEP] = WIDEST
        self._rated.widen()

    def handed_on(self) -> tuple[Floats, Floats]:
        """Means and variances of ψ after the last step, row by row, as another run may begin with
        them.
        """
        count = len(self)
        steps = np.maximum(self._clock - self._seen[:count], 0).astype(np.float64)
        means, variances = (
            array[:count].astype(np.float64) for array in (self._means, self._variances)
        )
        means, variances = predicted(means, variances, steps, self.drift, self.wander)
        doubted = np.where(
            self._seen[:count] == BEFORE_FIRST_STEP,
            np.minimum(variances + self._rated.doubt, WIDEST),
            variances,
        )
        return means, np.maximum(doubted, variances)

    def state(self, window: Sequence[tuple[float, float, float]] = ()) -> BeliefState:
        count = len(self)
        arrays = (self._means, self._variances, self._seen, self._since)
        means, variances, seen, since = (array[:count].tobytes() for array in arrays)
        if len(self._named) != count:  # rows are only added
            self._named = tuple(self._rows)
        return BeliefState(
            prompts=self._named,
            means=means,
            variances=variances,
            last_group_steps=seen,
            last_update_steps=since,
            strata=self._strata.state(),
            drift=self._learnt,
            clock=self._clock,
            window=tuple(window),
            process_noise=self._wander.state(),
            pass_rate_prior=self._rated.state(),
        )

    def restore(self, state: BeliefState) -> None:
        """Forget all, and believe what was saved.

        Raises `PromptDataError` where that is damaged.
        """
        if problem := state.problem():
            raise PromptDataError(
                f"run.resume: the checkpoint's beliefs are damaged ({problem}). Give another checkpoint"
            )
        self._rows, self._named = (
            {prompt: row for row, prompt in enumerate(state.prompts)},
            state.prompts,
        )
        self._means, self._variances = (
            np.frombuffer(a, np.float32).copy() for a in (state.means, state.variances)
        )
        self._seen, self._since = (
            np.frombuffer(array, np.int32).copy() for array in (state.last_group_steps, state.last_update_steps)
        )
        self._aside = np.array([prompt not in self._pool for prompt in state.prompts], np.bool_)
        self._strata.restore(state.strata)
        self._wander.restore(state.process_noise)
        self._rated.restore(state.pass_rate_prior)
        self._learnt, self._clock = state.drift, state.clock

    def _grow(self, size: int) -> None:
        more = size - len(self._means)
        self._means, self._variances = (
            np.pad(array, (0, more)) for array in (self._means, self._variances)
        )
        self._seen = np.pad(self._seen, (0, more), constant_values=NEVER_SAMPLED)
        self._since, self._aside = np.pad(self._since, (0, more)), np.pad(self._aside, (0, more))

    def _learn_drift(
        self,
        step: int,
        again: npt.NDArray[np.bool_],
        means: Floats,
        steps: Floats,
        seen: Floats,
        variances: Floats,
    ) -> None:
        """again: which were seen before; means: of that time; variances: of what is seen, V + R."""
        kept = _KEPT ** (step - self._clock)
        slope = np.where(again, steps * np.sin(2 * means), 0.0)
        moved, weight = self._learnt
        moved = kept * moved + float(np.sum(slope * (seen - means) / variances))
        self._learnt = (moved, kept * weight + float(np.sum(slope * slope / variances)))


def mixed_probability_of(means: Floats, variances: Floats, counts: Sequence[int]) -> Floats:
    """See `Beliefs.chances`; the first of the counts is that of a whole group."""
    mixed = [chance_of_mixed(means, variances, count) for count in counts]
    return np.stack([*mixed, 1 - chance_of_all_right(means, variances, counts[0])])


class MixedProbability:
    """Of one step: the chances of a prompt, those of `mixed_probability_of`."""

    def __init__(
        self, beliefs: Beliefs, step: int, known: npt.NDArray[np.bool_], counts: tuple[int, ...]
    ) -> None:
        self._beliefs, self._step, self._known, self._counts = beliefs, step, known, counts
        self._of_known: dict[Stratum, Floats] = {}
        self._of_stratum: dict[Stratum, tuple[float, ...]] = {}

    def of(self, prompt: Prompt, row: int) -> tuple[float, ...]:
        """One for each number of rollouts, and that of a whole group that is not all right."""
        stratum = stratum_of(prompt)
        if row < len(self._known) and self._known[row]:
            if stratum not in self._of_known:
                growth = self._beliefs.growth(stratum)
                self._of_known[stratum] = self._beliefs.chances(self._step, self._counts, growth)
            return tuple(self._of_known[stratum][:, row].tolist())
        if self._beliefs.rated(prompt, self._step) is not None:
            return self._expected(self._beliefs.start(prompt, self._step))
        if stratum not in self._of_stratum:
            self._of_stratum[stratum] = self._expected(self._beliefs.prior(stratum))
        return self._of_stratum[stratum]

    def _expected(self, belief: tuple[float, float]) -> tuple[float, ...]:
        mean, variance = (np.array([number]) for number in belief)
        return tuple(mixed_probability_of(mean, variance, self._counts)[:, 0].tolist())
