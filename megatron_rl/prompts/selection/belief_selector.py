"""Selection by beliefs: prompts that probably teach nothing are sampled rarely, and probed first.

These are prompts whose responses are probably all correct, and with skip=zero_variance also those
whose responses are probably all incorrect.

No choice depends on the order in which groups arrive
(tests/prompts/selection/test_belief_selector.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import msgspec
import numpy as np

from megatron_rl.config.schema import RolloutSettings, SelectionSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.credit.group_kinds import GroupKind
from megatron_rl.prompts.selection.acceptance import Acceptance, coin
from megatron_rl.prompts.selection.beliefs.beliefs import Beliefs
from megatron_rl.prompts.selection.beliefs.calibration import Calibration
from megatron_rl.prompts.selection.beliefs.group_prediction import GroupPredictions
from megatron_rl.prompts.selection.candidate import Candidate
from megatron_rl.prompts.selection.importance_weights import effective_share
from megatron_rl.prompts.selection.selector import Extension, RolloutRequest, SelectionResult
from megatron_rl.prompts.source import PromptSource

# A step samples no further round once it has this share of rollout.prompts_per_step mixed groups
_MIN_FILLED = 0.9
# A step that cannot be filled ends after this many passes over the prompts that can be offered.
_MAX_PASSES = 8
_ACCEPTANCE = Acceptance()
# By `selection.skip`: the probes that become whole groups
_EXTENDED_KINDS = {
    "all_correct": (GroupKind.MIXED, GroupKind.ALL_INCORRECT),
    "zero_variance": (GroupKind.MIXED,),
}


def first_counts(settings: SelectionSettings, group_size: int) -> tuple[int, int, int]:
    """Return the numbers of rollouts in a first request.

    They are those for a prompt that is likely, possibly and hardly useful.
    """
    probe = settings.probe_samples or group_size
    small_probe = max(2, probe // 2) if probe < group_size else group_size
    return group_size, probe, small_probe


class BeliefSelector:
    """Selects prompts by beliefs about their pass rates. See `Selector` and docs/selection.md.

    seed: seed of the random acceptance.
    acceptance: how likely prompts are accepted.
    """

    ignores_rollouts = False

    def __init__(
        self,
        source: PromptSource,
        rollout: RolloutSettings,
        settings: SelectionSettings,
        *,
        seed: int,
        acceptance: Acceptance = _ACCEPTANCE,
    ) -> None:
        self.source = source
        self.rollout = rollout
        self.settings = settings
        self.seed = seed
        self.acceptance = acceptance
        self.beliefs = Beliefs([prompt.id for prompt in source.train], source.rates)
        if source.initial_beliefs is not None:
            self.beliefs.restore(source.initial_beliefs)
        self.calibration = Calibration()

    def select(self, step: int) -> BeliefStep:
        self.source.begin_step()
        return BeliefStep(self, step)

    def state(self) -> SelectorState:
        return SelectorState(
            prompts=self.source.cursor, beliefs=self.beliefs.state(self.calibration.window)
        )

    def restore(self, state: SelectorState) -> None:
        """Restore a state. The state of a run without beliefs leaves the initial beliefs."""
        self.source.seek(state.prompts)
        if state.beliefs is not None:
            self.beliefs.restore(state.beliefs)
            self.calibration = Calibration(deque(state.beliefs.window))

    def inflate_variance(self) -> None:
        self.beliefs.inflate_variance()


@dataclass
class BeliefStep:
    """Selection of one step. See `StepSelection`."""

    selector: BeliefSelector
    step: int
    _candidates: list[Candidate] = field(default_factory=list, init=False)
    _prompt_ids: set[str] = field(default_factory=set, init=False)
    _acceptances: list[float] = field(default_factory=list, init=False)  # of all offered prompts
    _num_rounds: int = field(default=0, init=False)
    _has_learned: bool = field(default=False, init=False)
    _metrics: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        rollout = self.selector.rollout
        self._group_size = rollout.samples_per_prompt
        self._prompts_per_step = rollout.prompts_per_step
        self._first_counts = first_counts(self.selector.settings, self._group_size)
        self._extension = Extension(self._group_size, _EXTENDED_KINDS[self.selector.settings.skip])
        self._predictions = GroupPredictions(self.selector.beliefs, self.step, self._first_counts)

    def first_round(self) -> list[RolloutRequest]:
        """Return the requests of the first round, at least one if there is a prompt."""
        requests = self._round(self._prompts_per_step)
        if requests:
            return requests
        offer = self.selector.source.offer(self._prompt_ids)
        if offer is None:
            return []
        prompt, _ = offer
        whole_group = self._predictions.of(prompt, self.selector.beliefs.row(prompt))[0]
        size = self._group_size
        self._add(Candidate(prompt, 1.0, size, size, whole_group, whole_group))
        return [RolloutRequest(0, prompt, size)]

    def handle_group(self, index: int, group: Group) -> RolloutRequest | None:
        candidate = self._candidates[index]
        candidate.add(group)
        if candidate.is_whole or not self._extension.applies_to(group):
            return None
        first_sample = candidate.num_samples
        candidate.num_samples = self._group_size
        num_missing = self._group_size - first_sample
        return RolloutRequest(index, candidate.prompt, num_missing, first_sample)

    def forget_group(self, index: int) -> None:
        self._candidates[index].forget()

    def next_round(self) -> list[RolloutRequest]:
        num_mixed = sum(candidate.is_mixed for candidate in self._candidates)
        if num_mixed >= _MIN_FILLED * self._prompts_per_step:
            return []
        return self._round(self._prompts_per_step - num_mixed)

    def num_needed(self) -> None:
        """Return None: all groups are of use."""

    def result(self) -> SelectionResult:
        pairs = [
            (candidate, candidate.group)
            for candidate in self._candidates
            if candidate.group is not None
        ]
        if not self._has_learned:
            self._has_learned = True
            self.selector.beliefs.observe(self.step, [group for _, group in pairs])
            self._update_calibration()
        groups: list[Group] = []
        stopped_groups: list[Group] = []
        for candidate, group in pairs:
            target = groups if candidate.is_whole else stopped_groups
            target.append(
                msgspec.structs.replace(
                    group,
                    weight=candidate.weight(self.selector.settings),
                    prompt_weight=candidate.prompt_weight(self.selector.settings),
                )
            )
        self._set_metrics()
        return SelectionResult(tuple(groups), tuple(stopped_groups))

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def _round(self, num_mixed: float) -> list[RolloutRequest]:
        """Accept prompts until so many mixed groups are expected, and return their requests.

        Probes come first, because an extension takes a second wait. A probe counts in full, so the
        budget holds even if all probes are extended.
        """
        first_index = len(self._candidates)
        self._accept_prompts(num_mixed)
        requests = [
            RolloutRequest(
                index,
                candidate.prompt,
                candidate.num_samples,
                extension=self._extension if candidate.is_probe else None,
            )
            for index, candidate in enumerate(self._candidates[first_index:], first_index)
        ]
        self._num_rounds += bool(requests)
        return sorted(requests, key=lambda request: request.samples)

    def _accept_prompts(self, num_mixed: float) -> None:
        source = self.selector.source
        max_offers = _MAX_PASSES * source.num_available
        budget = self._remaining_budget()
        expected_mixed = 0.0
        while (
            expected_mixed < num_mixed
            and budget >= self._group_size
            and len(self._acceptances) < max_offers
        ):
            offer = source.offer(self._prompt_ids)
            if offer is None:
                break
            prompt, epoch = offer
            candidate = self._consider(prompt, epoch)
            if candidate is not None:
                self._add(candidate)
                expected_mixed += candidate.first_prediction.mixed_probability
                budget -= self._group_size

    def _remaining_budget(self) -> float:
        """Return the number of rollouts that the step may still request."""
        num_requested = sum(candidate.num_samples for candidate in self._candidates)
        budget = self.selector.settings.budget * self._prompts_per_step * self._group_size
        return budget - num_requested

    def _add(self, candidate: Candidate) -> None:
        self._prompt_ids.add(candidate.prompt.id)
        self._candidates.append(candidate)

    def _consider(self, prompt: Prompt, epoch: int) -> Candidate | None:
        """Accept or decline an offered prompt at random."""
        beliefs = self.selector.beliefs
        settings = self.selector.settings
        row = beliefs.row(prompt)
        predictions = self._predictions.of(prompt, row)
        whole_group = predictions[0]
        usefulness = 1.0 - whole_group.all_correct
        if settings.skip == "zero_variance":
            usefulness = whole_group.mixed_probability
        acceptance = self.selector.acceptance.probability(usefulness, beliefs.declines(row))
        self._acceptances.append(acceptance)
        if coin(self.selector.seed, epoch, prompt.id) >= acceptance:
            beliefs.count_decline(row)
            return None
        index = self._count_index(usefulness)
        return Candidate(
            prompt=prompt,
            acceptance=acceptance,
            group_size=self._group_size,
            first_samples=self._first_counts[index],
            prediction=whole_group,
            first_prediction=predictions[index],
        )

    def _count_index(self, usefulness: float) -> int:
        """Return which of `first_counts` applies."""
        target = self.selector.acceptance.target
        if usefulness >= target:
            return 0
        return 1 if usefulness >= target / 2 else 2

    def _set_metrics(self) -> None:
        beliefs = self.selector.beliefs
        probes = [candidate for candidate in self._candidates if candidate.is_probe]
        num_extended = sum(probe.is_whole for probe in probes)
        num_rollouts = sum(candidate.num_samples for candidate in self._candidates)
        num_candidates = len(self._candidates)
        settings = self.selector.settings
        weights = [
            candidate.weight(settings)
            for candidate in self._candidates
            if candidate.is_whole and candidate.is_mixed
        ]
        self._metrics = self.selector.calibration.metrics() | {
            **_acceptance_metrics(self._acceptances),
            "select/accept_rate": num_candidates / max(len(self._acceptances), 1),
            "select/acceptance": sum(c.acceptance for c in self._candidates)
            / max(num_candidates, 1),
            **_weight_metrics(weights),
            "select/declines_max": float(beliefs.max_declines()),
            "select/prompts": float(num_candidates),
            "select/rollouts": float(num_rollouts),
            "select/mixed": float(len(weights)),
            "select/unfilled": self._num_unfilled(len(weights)),
            "select/probes": float(len(probes)),
            "select/probes_extended": float(num_extended),
            "select/rounds": float(self._num_rounds),
            "select/drift": beliefs.drift,
            "select/process_noise": beliefs.process_noise,
            "select/unused_beliefs": float(beliefs.num_outside_pool),
        }

    def _update_calibration(self) -> None:
        """Compare predictions with the rollouts that they were made for, before an extension."""
        candidates = [
            candidate
            for candidate in self._candidates
            if candidate.first_kind not in (None, GroupKind.TOO_FEW_VERDICTS)
        ]
        predicted_mixed = sum(
            candidate.first_prediction.mixed_probability for candidate in candidates
        )
        observed_mixed = sum(candidate.first_kind is GroupKind.MIXED for candidate in candidates)
        self.selector.calibration.add(predicted_mixed, observed_mixed, len(candidates))

    def _num_unfilled(self, num_mixed: int) -> float:
        """Return the number of missing mixed groups, 0 if the step has enough of them."""
        num_missing = self._prompts_per_step - num_mixed
        is_unfilled = num_missing > (1 - _MIN_FILLED) * self._prompts_per_step
        return float(num_missing) if is_unfilled else 0.0


def _acceptance_metrics(acceptances: Sequence[float]) -> dict[str, float]:
    """Return percentiles of the acceptance probabilities of the offered prompts."""
    if not acceptances:
        return {}
    p10, p50, p90 = np.quantile(acceptances, [0.1, 0.5, 0.9]).tolist()
    return {
        "select/acceptance_p10": p10,
        "select/acceptance_p50": p50,
        "select/acceptance_p90": p90,
    }


def _weight_metrics(weights: Sequence[float]) -> dict[str, float]:
    """Return metrics of the weights of the mixed groups that train."""
    if not weights:
        return {"select/weight_ess": 1.0}
    return {
        "select/weight_ess": effective_share(weights),
        "select/weight_mean": fmean(weights),
        "select/weight_p90": float(np.quantile(weights, 0.9)),
        "select/weight_max": max(weights),
    }
