"""The sampling of one training step while it is under way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.contracts.group import Group
from megatron_rl.prompts.selection.selector import RolloutRequest, SelectionResult, StepSelection
from megatron_rl.rollouts.messages import VersionBudget, extension_id
from megatron_rl.rollouts.rollout_batch import merge_groups


@dataclass
class StepSampling:
    """The requests of one step, and the groups that have arrived.

    Parts of a group come under different ids: those of the first request and of its extension.

    budget: of each response, None without a limit. parts: by the id of their request.
    generated_tokens: those that engines have sampled. unused_tokens: those of groups that were
    dropped, by their class in the account.
    """

    step: int
    selection: StepSelection
    budget: VersionBudget | None = None
    parts: dict[str, Group] = field(default_factory=dict)
    generated_tokens: int = 0
    unused_tokens: Mapping[str, int] = field(default_factory=dict)
    _requests: dict[str, RolloutRequest] = field(default_factory=dict)  # without an answer, by id
    _groups: dict[int, Group] = field(default_factory=dict)  # by index
    _part_ids: dict[str, list[str]] = field(default_factory=dict)  # by group id

    @property
    def label(self) -> str:
        """The name of the step in the ids of its groups."""
        return label_of(self.step)

    @property
    def requested_ids(self) -> Collection[str]:
        """The ids of the requests without an answer, now and whenever it is asked."""
        return self._requests.keys()

    def register(self, requests: Sequence[RolloutRequest]) -> Mapping[str, RolloutRequest]:
        """Expect answers to requests. Returns the requests by their ids."""
        requests_by_id = {_part_id(self.label, request): request for request in requests}
        self._requests |= requests_by_id
        return requests_by_id

    def take(self, part: Group) -> list[RolloutRequest]:
        """Take an answer. Returns the request that extends its group, if there is one."""
        index = self._requests.pop(part.group_id).index
        self.parts[part.group_id] = part
        first = self._groups.get(index)
        group = part if first is None else merge_groups(first, part)
        self._groups[index] = group
        self._part_ids.setdefault(group.group_id, []).append(part.group_id)
        extension = self.selection.handle_group(index, group)
        return [] if extension is None else [extension]

    def surplus_ids(self) -> tuple[list[str], list[str]]:
        """Return the ids of parts that the step does not need: without an answer, and with one."""
        num_needed = self.selection.num_needed()
        waiting_ids = [
            id_
            for id_, request in self._requests.items()
            if num_needed is not None and request.index >= num_needed
        ]
        delivered_ids = [
            id_
            for index, group in self._groups.items()
            if num_needed is not None and index >= num_needed
            for id_ in self._part_ids[group.group_id]
        ]
        return waiting_ids, delivered_ids

    def drop(self, part_ids: Collection[str]) -> None:
        """Forget parts of groups that the step does not need."""
        for part_id in part_ids:
            self._requests.pop(part_id, None)
            self.parts.pop(part_id, None)

    def delivered_ids(self, result: SelectionResult) -> tuple[str, ...]:
        """Return the ids of all parts, in the order of the groups in the result."""
        groups = result.groups + result.stopped_groups + result.surplus_groups
        return tuple(id_ for group in groups for id_ in self._part_ids[group.group_id])


def label_of(step: int) -> str:
    """Return the name of a step in the ids of its groups."""
    return f"step-{step}"


def _part_id(label: str, request: RolloutRequest) -> str:
    group_id = f"{label}-{request.index}"
    return extension_id(group_id, request.first_sample) if request.first_sample else group_id
