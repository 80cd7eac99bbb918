"""One prompt that a step samples, with its requests and the weight of its group."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import SelectionSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.credit.group_kinds import GroupKind, kind_of
from megatron_rl.prompts.selection.beliefs.group_prediction import GroupPrediction
from megatron_rl.prompts.selection.importance_weights import extension_weight, stopped_weight


@dataclass
class Candidate:
    """Prompt that a step samples.

    acceptance: probability with which the step accepted it.
    group_size: number of rollouts of a whole group.
    first_samples: number of rollouts in its first request.
    prediction, first_prediction: predictions of a whole group, and of the first request's rollouts.
    num_samples: number of rollouts requested so far, 0 before the first request.
    group: all rollouts that have arrived.
    first_kind: kind of the rollouts of the first request.
    kind: kind of the group.
    """

    prompt: Prompt
    acceptance: float
    group_size: int
    first_samples: int
    prediction: GroupPrediction
    first_prediction: GroupPrediction
    num_samples: int = 0
    group: Group | None = None
    first_kind: GroupKind | None = None
    kind: GroupKind | None = None

    def __post_init__(self) -> None:
        self.num_samples = self.num_samples or self.first_samples

    @property
    def is_mixed(self) -> bool:
        return self.kind is GroupKind.MIXED

    @property
    def is_probe(self) -> bool:
        """True if the first request is smaller than a whole group."""
        return self.first_samples < self.group_size

    @property
    def is_whole(self) -> bool:
        """True if a whole group was requested."""
        return self.num_samples == self.group_size

    def add(self, group: Group) -> None:
        """Take all rollouts that have arrived."""
        self.group = group
        self.kind = kind_of(group)
        self.first_kind = self.first_kind or self.kind

    def forget(self) -> None:
        """Expect the rollouts of the first request again."""
        self.num_samples = self.first_samples
        self.group = None
        self.first_kind = None
        self.kind = None

    def prompt_weight(self, settings: SelectionSettings) -> float:
        """Return the part of the weight that compensates for how seldom the prompt is accepted."""
        return 1.0 if settings.reweight is None else min(settings.reweight, 1.0 / self.acceptance)

    def weight(self, settings: SelectionSettings) -> float:
        """Return the weight of the group, which compensates for how seldom it is sampled."""
        weight = self.prompt_weight(settings)
        if not self.is_probe or self.group is None:
            return weight
        if self.is_whole and self.is_mixed:
            return weight * extension_weight(self.group, self.first_samples, skip=settings.skip)
        if self.is_whole:
            return weight
        return weight * self._stopped_weight()

    def _stopped_weight(self) -> float:
        """Return the factor of a probe that was not extended. Kinds that never train have 1."""
        if self.kind is GroupKind.ALL_CORRECT:
            chances = (self.first_prediction.all_correct, self.prediction.all_correct)
        elif self.kind is GroupKind.ALL_INCORRECT:
            chances = (self.first_prediction.all_incorrect, self.prediction.all_incorrect)
        else:
            return 1.0
        return stopped_weight(*chances, probe=self.first_samples, group_size=self.group_size)
