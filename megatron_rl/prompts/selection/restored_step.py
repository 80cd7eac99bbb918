"""The selection of a step whose groups a checkpoint has. Its choices have been made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from megatron_rl.contracts.group import Group
from megatron_rl.credit.group_kinds import GroupKind, kind_of
from megatron_rl.prompts.selection.selector import RolloutRequest, SelectionResult, SingleRound


@dataclass
class RestoredStep(SingleRound):
    """Keeps the classes and weights of groups that are read. See `StepSelection`.

    A group with other rollouts was sampled again. It is a whole group without a probe: the belief
    that the weight of a stopped probe needs is not in the checkpoint. So it is credited with the
    weight of its prompt alone, unless it is mixed and was surplus.

    saved: what the checkpoint has. The index of a group is its place in there.
    saved_metrics: of the selection, before the checkpoint.
    """

    saved: SelectionResult
    saved_metrics: Mapping[str, float]

    def first_round(self) -> list[RolloutRequest]:
        """Return requests for all groups. What the checkpoint has of them is their answer."""
        return [
            RolloutRequest(index, group.prompt, len(group.rollouts))
            for index, group in enumerate(self.saved.all_groups)
        ]

    def result(self) -> SelectionResult:
        groups: list[Group] = []
        stopped_groups: list[Group] = []
        surplus_groups: list[Group] = []
        surplus_ids = {group.group_id for group in self.saved.surplus_groups}
        stopped_ids = {group.group_id for group in self.saved.stopped_groups}
        for index, saved in enumerate(self.saved.all_groups):
            group = self._groups[index]
            is_read = _contents(group) == _contents(saved)
            weight = saved.weight if is_read else saved.prompt_weight
            target = groups
            if is_read and saved.group_id in stopped_ids:
                target = stopped_groups
            elif saved.group_id in surplus_ids and (is_read or kind_of(group) is GroupKind.MIXED):
                target = surplus_groups
            target.append(
                msgspec.structs.replace(group, weight=weight, prompt_weight=saved.prompt_weight)
            )
        return SelectionResult(tuple(groups), tuple(stopped_groups), tuple(surplus_groups))

    def metrics(self) -> dict[str, float]:
        return dict(self.saved_metrics)


def _contents(group: Group) -> list[object]:
    """Return what tells two samplings of a group apart. The seconds of verdicts always differ."""
    return [
        (ref.sample_index, ref.verdict, ref.num_generated, ref.tokens_by_version)
        for ref in group.rollouts
    ]
