"""Interface of prompt selectors, which choose the prompts of a step and the rollouts of each.

No choice depends on the order in which groups arrive. A resumed run therefore makes the same
choices as an uninterrupted one (tests/prompts/selection/test_uniform.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.contracts.wire_types import Count
from megatron_rl.credit.group_kinds import GroupKind, kind_of


class Extension(msgspec.Struct, frozen=True):
    """The rule by which a probe becomes a whole group. It travels with the request for the probe.

    It extends a probe to `group_size` rollouts if it is of one of these kinds.

    The rule is a pure function of the probe, so whoever has its rollouts can apply it.
    """

    group_size: Count
    kinds: tuple[GroupKind, ...]

    def applies_to(self, probe: Group) -> bool:
        """Return True if the rest of the group is to be sampled."""
        return kind_of(probe) in self.kinds


@dataclass(frozen=True)
class RolloutRequest:
    """Request for `samples` rollouts of a prompt.

    index: number of the group in the step.
    first_sample: number of rollouts that the group already has.
    extension: when the rest of the group follows. None: never.
    """

    index: int
    prompt: Prompt
    samples: int
    first_sample: int = 0
    extension: Extension | None = None


@dataclass(frozen=True)
class SelectionResult:
    """Groups of a step by their use, each in the order of their indices.

    groups: groups to be credited.
    stopped_groups: groups that were not extended after a probe.
    surplus_groups: mixed groups that the step did not need.
    """

    groups: tuple[Group, ...]
    stopped_groups: tuple[Group, ...] = ()
    surplus_groups: tuple[Group, ...] = ()

    @property
    def all_groups(self) -> tuple[Group, ...]:
        return self.groups + self.stopped_groups + self.surplus_groups


class StepSelection(Protocol):
    """Selection of one step."""

    def first_round(self) -> list[RolloutRequest]:
        """Return the requests of the first round."""
        ...

    def handle_group(self, index: int, group: Group) -> RolloutRequest | None:
        """Take a group with all rollouts requested so far. A returned request extends the group.

        It is returned if the first request has an `extension` that applies to the group, so that
        whoever samples the group may begin with it before.
        """
        ...

    def forget_group(self, index: int) -> None:
        """Expect a group that is lost anew, from its first request on."""
        ...

    def next_round(self) -> list[RolloutRequest]:
        """Return the requests of a further round, after all groups of the round have arrived.

        An empty list ends the step.
        """
        ...

    def num_needed(self) -> int | None:
        """Return how many groups, in the order of their indices, decide the step alone.

        Later groups are of no use, whatever their rollouts are. None: all groups are of use, as far
        as is known yet.
        """
        ...

    def result(self) -> SelectionResult:
        """Return all groups that are of use. Called at the end of the step.

        Called again after lost groups have come anew. Beliefs learn from the first call alone.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics under `select/`. Called after `result`."""
        ...


@dataclass
class SingleRound:
    """The groups of a `StepSelection` with one round, which extends none. All are of use."""

    _groups: dict[int, Group] = field(default_factory=dict, init=False)

    def handle_group(self, index: int, group: Group) -> RolloutRequest | None:
        self._groups[index] = group
        return None

    def forget_group(self, index: int) -> None:
        """Do nothing: the group that comes again takes its place."""

    def next_round(self) -> list[RolloutRequest]:
        return []

    def num_needed(self) -> None:
        """Return None: all groups are of use."""


class Selector(Protocol):
    """Selects prompts, one step after the other.

    ignores_rollouts: True if a step depends on no rollout, not even of the same step.
    """

    @property
    def ignores_rollouts(self) -> bool: ...

    def select(self, step: int) -> StepSelection: ...

    def state(self) -> SelectorState:
        """Return the state between two steps, which `restore` takes."""
        ...

    def restore(self, state: SelectorState) -> None:
        """Restore a state. Raises `PromptDataError` if it belongs to other prompts."""
        ...

    def inflate_variance(self) -> None:
        """Make the beliefs about prompts uninformative, because the task has changed."""
        ...
