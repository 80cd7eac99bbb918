"""Rollout batches: prompts are selected, groups of rollouts are requested and collected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.credit.source_metrics import source_metrics
from megatron_rl.prompts.selection.selector import RolloutRequest, Selector, StepSelection
from megatron_rl.rewards.runner import ABANDONED
from megatron_rl.rollouts.messages import GroupRequest
from megatron_rl.rollouts.queue import CollectorFailed, RolloutQueue
from megatron_rl.rollouts.rejections import NON_FINITE, count_unusable, require_usable


class TooManyRejected(Failure):
    """Too many rollouts of a batch could not be used. The rest would be an accidental selection."""

    exit_code = ExitCode.ENGINE_FAILED


@dataclass(frozen=True)
class RolloutBatch:
    """Groups of one training step.

    groups: to be credited, in the order of their prompts.
    stopped_groups, surplus_groups: sampled and left out (see `SelectionResult`).
    generated_tokens: tokens that engines sampled during this step.
    engines_left_out: number of engines that are left out at the end, because they failed.
    delivered_ids: ids under which the rollouts have to be released.
    parts: by delivered id, the part of a group that came under it.
    num_repeated: requests that were sent again, because a collector was gone.
    selection_metrics: of the prompt selection.
    """

    groups: tuple[Group, ...]
    generated_tokens: int
    engines_left_out: int = 0
    stopped_groups: tuple[Group, ...] = ()
    surplus_groups: tuple[Group, ...] = ()
    delivered_ids: tuple[str, ...] = ()
    parts: Mapping[str, Group] = field(default_factory=dict)
    num_repeated: int = 0
    selection_metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def all_groups(self) -> tuple[Group, ...]:
        """All groups that were sampled: credited, stopped and surplus ones."""
        return self.groups + self.stopped_groups + self.surplus_groups

    @property
    def rejections(self) -> Counter[str]:
        """Number of requested rollouts that could not be used, by reason."""
        return sum((Counter(group.rejections) for group in self.all_groups), Counter[str]())

    @property
    def reward_exposed(self) -> float:
        """Seconds of scoring after the last response, on the node where it took longest.

        Each node has its own clock. A group whose samples come from several nodes has times of
        both clocks, and is left out.
        """
        groups_by_node: dict[int, list[Group]] = {}
        for group in self.all_groups:
            nodes = {rollout.location.node for rollout in group.rollouts}
            if len(nodes) == 1:
                groups_by_node.setdefault(nodes.pop(), []).append(group)
        waits = (
            max(g.scored_at for g in groups) - max(g.generated_at for g in groups)
            for groups in groups_by_node.values()
        )
        return max(0.0, *waits, 0.0)

    def with_parts(self, parts: Mapping[str, Group], *, num_repeated: int) -> RolloutBatch:
        """Return the batch with other parts under some of the delivered ids.

        num_repeated: the requests for them, which are added.
        """
        all_parts = {**self.parts, **parts}
        merged_groups: dict[str, Group] = {}
        for part_id in self.delivered_ids:
            part = all_parts[part_id]
            # The first part has the id of its group, and comes first
            first = merged_groups.get(_first_id(part_id))
            merged = part if first is None else merge_groups(first, part)
            merged_groups[_first_id(part_id)] = merged

        def replaced(groups: tuple[Group, ...]) -> tuple[Group, ...]:
            return tuple(
                msgspec.structs.replace(merged_groups[group.group_id], weight=group.weight)
                for group in groups
            )

        return replace(
            self,
            groups=replaced(self.groups),
            stopped_groups=replaced(self.stopped_groups),
            surplus_groups=replaced(self.surplus_groups),
            num_repeated=self.num_repeated + num_repeated,
            parts=all_parts,
        )

    def require(self, label: str, max_rejected_share: float) -> None:
        """Raise `TooManyRejected` or `UserClassFailed` when too many rollouts are unusable.

        Raises its subclass `NonFiniteResponses` if NaN is the cause of most.

        max_rejected_share: largest share of rollouts that may be unusable. It is an error in any
        case if all of them are.
        """
        num_rollouts = sum(len(group.rollouts) for group in self.all_groups)
        try:
            require_usable(
                self.all_groups,
                self.rejections.total() + num_rollouts,
                subject=f"batch {label}",
                key="rollout.max_rejected_share",
                limit=max_rejected_share,
                failure=TooManyRejected,
            )
        except TooManyRejected as failure:
            losses = count_unusable(self.all_groups)
            if 2 * losses[NON_FINITE] > losses.total():
                raise NonFiniteResponses(str(failure), self) from None
            raise

    def metrics(self) -> dict[str, float]:
        """Return the metrics under `rollout/`, `reward/` and `select/`, and of each source."""
        rollouts = [rollout for group in self.all_groups for rollout in group.rollouts]
        rejections = self.rejections
        values = {
            "rollout/tokens": float(self.generated_tokens),
            "rollout/samples": float(len(rollouts)),
            "rollout/rejected": float(rejections.total()),
            "rollout/engines_left_out": float(self.engines_left_out),
            "rollout/repeated": float(self.num_repeated),
            "time/reward_exposed": self.reward_exposed,
        }
        values |= _reward_metrics(rollouts)
        values |= _length_metrics(rollouts)
        values |= self.selection_metrics
        values |= source_metrics(self.all_groups)
        values |= {f"rollout/rejected/{reason}": float(n) for reason, n in rejections.items()}
        return values


class NonFiniteResponses(TooManyRejected):
    """Most of the rollouts that cannot be used have log-probabilities that are NaN or infinite.

    batch: the rollouts, which have to be released.
    """

    def __init__(self, text: str, batch: RolloutBatch) -> None:
        super().__init__(text)
        self.batch = batch


@dataclass(frozen=True)
class RolloutSampler:
    """Samples rollout batches through a queue.

    stop_token_ids: tokens that end a response.
    idle: called regularly while rollouts are running.
    """

    queue: RolloutQueue
    settings: RolloutSettings
    selector: Selector
    stop_token_ids: tuple[int, ...]
    idle: Callable[[], None]

    def sample(self, step: int) -> RolloutBatch:
        """Sample and score one batch. Raises `TooManyRejected` or `UserClassFailed`."""
        label = f"step-{step}"
        tokens_before = self.queue.generated_tokens
        repeated_before = self.queue.num_repeated
        selection = self.selector.select(step)
        parts, request_ids = self._collect(label, selection)
        result = selection.result()
        all_groups = result.groups + result.stopped_groups + result.surplus_groups
        batch = RolloutBatch(
            groups=result.groups,
            stopped_groups=result.stopped_groups,
            surplus_groups=result.surplus_groups,
            generated_tokens=self.queue.generated_tokens - tokens_before,
            engines_left_out=len(self.queue.engines_left_out),
            delivered_ids=tuple(id_ for group in all_groups for id_ in request_ids[group.group_id]),
            parts=parts,
            num_repeated=self.queue.num_repeated - repeated_before,
            selection_metrics=selection.metrics(),
        )
        batch = self._without_lost_groups(batch)
        batch.require(label, self.settings.max_rejected_share)
        return batch

    def sample_again(self, batch: RolloutBatch, rollout_ids: Sequence[str]) -> RolloutBatch:
        """Replace the groups of these rollouts, which are gone, and others that are gone too.

        The requests have the same ids and seeds, so deterministic engines give the same groups.
        """
        ids = set(rollout_ids)
        lost_parts = [
            part_id
            for part_id, part in batch.parts.items()
            if any(rollout.rollout_id in ids for rollout in part.rollouts)
        ]
        if not lost_parts and not self.queue.lost_groups(batch.delivered_ids):
            raise CollectorFailed(
                f"rollouts are gone that no request of the batch has sampled: {sorted(ids)[:4]}"
            )
        return self._without_lost_groups(self._repeat(batch, lost_parts))

    def _without_lost_groups(self, batch: RolloutBatch) -> RolloutBatch:
        while lost_parts := self.queue.lost_groups(batch.delivered_ids):
            batch = self._repeat(batch, lost_parts)
        return batch

    def _repeat(self, batch: RolloutBatch, part_ids: Sequence[str]) -> RolloutBatch:
        """Request parts of groups again and put them into the batch.

        The tokens of the lost ones are in the batch's count already.
        """
        repeated_before = self.queue.num_repeated
        self.queue.request_again(part_ids)
        new_parts = {part.group_id: part for part in self.queue.as_completed(self.idle)}
        num_repeated = self.queue.num_repeated - repeated_before
        return batch.with_parts(new_parts, num_repeated=num_repeated)

    def state(self) -> SelectorState:
        """Return the selector's state."""
        return self.selector.state()

    def restore(self, state: SelectorState) -> None:
        """Restore the selector's state."""
        self.selector.restore(state)

    def inflate_variance(self) -> None:
        """Make the selector's beliefs less certain."""
        self.selector.inflate_variance()

    def _collect(
        self, label: str, selection: StepSelection
    ) -> tuple[dict[str, Group], dict[str, list[str]]]:
        """Request groups until the selection has enough of them.

        Returns the parts by the id of their request, and the ids of the requests of each group.
        """
        groups: dict[int, Group] = {}
        parts: dict[str, Group] = {}
        request_ids: dict[str, list[str]] = {}
        requests = selection.first_round()
        while requests:
            outstanding = self._submit(label, requests)
            for part in self.queue.as_completed(self.idle):
                index = outstanding.pop(part.group_id).index
                parts[part.group_id] = part
                group = merge_groups(groups[index], part) if index in groups else part
                groups[index] = group
                request_ids.setdefault(group.group_id, []).append(part.group_id)
                if (extension := selection.handle_group(index, group)) is not None:
                    outstanding |= self._submit(label, [extension])
            requests = selection.next_round()
        return parts, request_ids

    def _submit(self, label: str, requests: Sequence[RolloutRequest]) -> dict[str, RolloutRequest]:
        """Submit requests and return them by group id.

        The first request of a group and its extensions have different ids.
        """
        sampling = Sampling(
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            stop_token_ids=self.stop_token_ids,
        )
        by_id = {_group_id(label, request): request for request in requests}
        self.queue.submit(
            [
                GroupRequest(
                    group_id=group_id,
                    prompt=request.prompt,
                    num_samples=request.samples,
                    first_sample=request.first_sample,
                    sampling=sampling,
                )
                for group_id, request in by_id.items()
            ]
        )
        return by_id


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


def _group_id(label: str, request: RolloutRequest) -> str:
    extension = f"+{request.first_sample}" if request.first_sample else ""
    return f"{label}-{request.index}{extension}"


def _first_id(part_id: str) -> str:
    """Return the id of the group that a part belongs to."""
    return part_id.partition("+")[0]


def _reward_metrics(rollouts: Sequence[RolloutRef]) -> dict[str, float]:
    rewards = [r.verdict.reward for r in rollouts if r.verdict.reward is not None]
    values = {"reward/no_verdict": float(len(rollouts) - len(rewards))}
    num_abandoned = sum(r.verdict.reason == ABANDONED for r in rollouts)
    if num_abandoned:
        values["reward/abandoned"] = float(num_abandoned)
    if rewards:
        values["reward/mean"] = sum(rewards) / len(rewards)
    return values


def _length_metrics(rollouts: Sequence[RolloutRef]) -> dict[str, float]:
    if not rollouts:
        return {}
    num_truncated = sum(r.finish_reason == "length" for r in rollouts)
    return {
        "rollout/response_length": sum(r.num_trainable for r in rollouts) / len(rollouts),
        "rollout/truncated": num_truncated / len(rollouts),
    }
