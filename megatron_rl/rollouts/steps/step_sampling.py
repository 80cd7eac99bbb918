"""The sampling of one training step while it is under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.prompts.selection.restored_step import RestoredStep
from megatron_rl.prompts.selection.selector import RolloutRequest, SelectionResult, StepSelection
from megatron_rl.rollouts.wire.messages import GroupRequest, extension_id, first_id


@dataclass
class StepSampling:
    """The requests of one step, and the groups that have arrived.

    The two parts of a group come under different ids, of the first request and of its extension.

    parts: by the id of their request.
    generated_tokens: number of tokens that engines have sampled. unused_tokens: tokens of groups
    that were dropped, by their class in the account.
    """

    step: int
    selection: StepSelection
    parts: dict[str, Group] = field(default_factory=dict)
    generated_tokens: int = 0
    unused_tokens: Mapping[str, int] = field(default_factory=dict)
    # By id. Requests with a part have their answer
    _requests: dict[str, RolloutRequest] = field(default_factory=dict, init=False)

    @classmethod
    def restored(cls, step: int, selection: RestoredStep) -> StepSampling:
        """Return the sampling of a step whose groups a checkpoint has."""
        sampling = cls(step, selection)
        groups = selection.saved.all_groups
        for request, group in zip(selection.first_round(), groups, strict=True):
            sampling._requests[group.group_id] = request
            sampling.take(group)
        return sampling

    @property
    def requested_ids(self) -> list[str]:
        """The ids of the requests without an answer."""
        return [id_ for id_ in self._requests if id_ not in self.parts]

    def is_requested(self, part_id: str) -> bool:
        """Return True for the id of a request without an answer."""
        return part_id in self._requests and part_id not in self.parts

    def register(
        self, requests: Sequence[RolloutRequest], sampling: Sampling
    ) -> list[GroupRequest]:
        """Expect answers to requests. Returns what the queue is asked for."""
        requests_by_id = {_part_id(self.step, request): request for request in requests}
        self._requests |= requests_by_id
        return [
            GroupRequest(
                group_id=part_id,
                prompt=request.prompt,
                num_samples=request.samples,
                first_sample=request.first_sample,
                sampling=sampling,
                extension=request.extension,
                step=self.step,
            )
            for part_id, request in requests_by_id.items()
        ]

    def take(self, part: Group) -> list[RolloutRequest]:
        """Take an answer. Returns the request that extends its group, if there is one."""
        index = self._requests[part.group_id].index
        first = self.parts.get(first_id(part.group_id))
        group = part if first is None else merge_groups(first, part)
        self.parts[part.group_id] = part
        extension = self.selection.handle_group(index, group)
        return [] if extension is None else [extension]

    def forget(self, lost_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Expect lost parts again.

        If the first part of a group is lost, the selection decides again whether to extend it. Its
        other part is dropped.

        Returns the ids that have to be requested again, and those that were dropped.
        """
        lost_groups = {id_ for id_ in lost_ids if id_ == first_id(id_)}
        for group_id in lost_groups:
            self.selection.forget_group(self._requests[group_id].index)
        dropped_ids = [id_ for id_ in self.parts if first_id(id_) in lost_groups - {id_}]
        repeated_ids = [id_ for id_ in lost_ids if id_ not in dropped_ids]
        for id_ in repeated_ids:
            del self.parts[id_]
        self.drop(dropped_ids)
        return repeated_ids, dropped_ids

    def surplus_ids(self) -> tuple[list[str], list[str]]:
        """Return the ids of parts that the step does not need: without an answer, and with one."""
        num_needed = self.selection.num_needed()
        surplus_ids = [
            id_
            for id_, request in self._requests.items()
            if num_needed is not None and request.index >= num_needed
        ]
        waiting_ids = [id_ for id_ in surplus_ids if id_ not in self.parts]
        delivered_ids = [id_ for id_ in surplus_ids if id_ in self.parts]
        return waiting_ids, delivered_ids

    def drop(self, part_ids: Collection[str]) -> None:
        """Forget parts of groups that the step does not need."""
        for part_id in part_ids:
            self._requests.pop(part_id, None)
            self.parts.pop(part_id, None)

    def delivered_ids(self, result: SelectionResult) -> tuple[str, ...]:
        """Return the ids of all parts, in the order of the groups in the result."""
        places = {group.group_id: place for place, group in enumerate(result.all_groups)}
        return tuple(sorted(self.parts, key=lambda id_: places[first_id(id_)]))


def label_of(step: int) -> str:
    """Return the name of a step in the ids of its groups."""
    return f"step-{step}"


def merge_groups(first: Group, rest: Group) -> Group:
    """Merge two parts of a group under the id of the first one."""
    return msgspec.structs.replace(
        first,
        rollouts=first.rollouts + rest.rollouts,
        rejections=dict(Counter(first.rejections) + Counter(rest.rejections)),
        rejected_tokens=dict(Counter(first.rejected_tokens) + Counter(rest.rejected_tokens)),
        environment_error=first.environment_error or rest.environment_error,
        generated_at=max(first.generated_at, rest.generated_at),
        scored_at=max(first.scored_at, rest.scored_at),
    )


def _part_id(step: int, request: RolloutRequest) -> str:
    group_id = f"{label_of(step)}-{request.index}"
    return extension_id(group_id, request.first_sample) if request.first_sample else group_id
