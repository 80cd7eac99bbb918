"""The groups of open steps that a checkpoint has, on rank 0 of a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from megatron_rl.contracts.group import Group, sampled_tokens
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts.recording.format import SavedRollout
from megatron_rl.rollouts.recording.reader import read_saved_rollout
from megatron_rl.rollouts.wire.messages import GroupRequest
from megatron_rl.rollouts.wire.store import RolloutStore


@dataclass(frozen=True)
class SavedGroup:
    """The state of a group in a checkpoint.

    rollouts: where the checkpoint has `group.rollouts`, in their order.
    """

    group: Group
    rollouts: tuple[SavedRollout, ...]

    @property
    def is_finished(self) -> bool:
        return not self.group.open_samples

    @property
    def num_tokens(self) -> int:
        """The tokens that engines sampled for it."""
        return sampled_tokens(self.group)

    def fits(self, request: GroupRequest) -> bool:
        """Return True if it is a group of this request."""
        group = self.group
        indices = range(request.first_sample, request.first_sample + request.num_samples)
        samples = {*group.open_samples, *(ref.sample_index for ref in group.rollouts)}
        num_known = len(samples) + sum(group.rejections.values())
        return (
            group.prompt.id == request.prompt.id
            and group.prompt.token_ids == request.prompt.token_ids
            and num_known == request.num_samples
            and samples <= set(indices)
        )


class SavedGroups:
    """Groups of a checkpoint that wait until their step begins again.

    load: reads a rollout, given its place and the id of its prompt. Raises ValueError.
    log: writes a line for people.
    """

    def __init__(
        self,
        groups: Iterable[SavedGroup] = (),
        load: Callable[[SavedRollout, str], Rollout] = read_saved_rollout,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._groups = {start.group.group_id: start for start in groups}
        self._load = load
        self._store = RolloutStore(node=0)  # of rank 0
        self._log = log
        self._num_misfits = 0

    def take(self, request: GroupRequest) -> SavedGroup | None:
        """Return the saved part of a requested group, None if there is none. It is taken once."""
        start = self._groups.pop(request.group_id, None)
        if start is None or start.fits(request):
            return start
        self._num_misfits += 1
        self._write_log(
            f"{start.num_tokens} tokens of group {request.group_id} in the checkpoint do not fit "
            "the settings of this run: the group is sampled anew"
        )
        return None

    def count_misfits(self) -> int:
        """Return how many groups did not fit what was requested, since the last call."""
        num_misfits = self._num_misfits
        self._num_misfits = 0
        return num_misfits

    def drop(self) -> int:
        """Drop the groups that were not taken. Returns the tokens that engines sampled for them."""
        num_tokens = sum(start.num_tokens for start in self._groups.values())
        self._groups.clear()
        return num_tokens

    def store(self, start: SavedGroup) -> Group | None:
        """Store the saved part of a group in this process.

        Returns None if its checkpoint was removed meanwhile.
        """
        group = start.group
        try:
            rollouts = [self._load(saved, group.prompt.id) for saved in start.rollouts]
        except ValueError as error:
            self._write_log(f"warning: group {group.group_id} is not saved again: {error}")
            return None
        locations = self._store.put(group.group_id, rollouts)
        refs = [
            msgspec.structs.replace(ref, location=location)
            for ref, location in zip(group.rollouts, locations, strict=True)
        ]
        return msgspec.structs.replace(group, rollouts=tuple(refs))

    def _write_log(self, text: str) -> None:
        if self._log is not None:
            self._log(text)

    def release(self, group_ids: Iterable[str]) -> None:
        """Free what `store` has stored."""
        self._store.release(group_ids)


NOTHING_SAVED = SavedGroups()
