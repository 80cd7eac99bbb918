"""Prompts in, judged groups out: one rollout batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.prompts.selection.selector import RolloutRequest, Selector
from megatron_rl.rollouts.messages import GroupRequest
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.rejections import (
    UserClassFailed,
    first_reason,
    lost_by_user_class,
    too_many,
    unusable,
)


class TooManyRejected(Failure):
    """So many rollouts of a batch could not be used that going on would train on what is left by
    accident.
    """

    exit_code = ExitCode.ENGINE_FAILED


@dataclass(frozen=True)
class RolloutBatch:
    """groups: to be credited, in the order of their prompts; stopped, surplus: drawn and left out
    (see `SelectionResult`).

    generated_tokens: what engines drew in this step. carried_in, carried_out: tokens of groups that
    the step before drew for this one, and of those that this one drew for the next.
    engines_left_out: how many engines were not asked any more at the end, because they failed.
    delivered: what is to be released. choices: metrics of the selection.
    """

    groups: tuple[Group, ...]
    generated_tokens: int
    engines_left_out: int = 0
    stopped: tuple[Group, ...] = ()
    surplus: tuple[Group, ...] = ()
    carried_in: int = 0
    carried_out: int = 0
    delivered: tuple[str, ...] = ()
    choices: Mapping[str, float] = field(default_factory=dict)

    @property
    def drawn(self) -> tuple[Group, ...]:
        return self.groups + self.stopped + self.surplus

    @property
    def rejected(self) -> Counter[str]:
        """Rollouts that were asked for and could not be used, by reason."""
        return sum((Counter(group.rejections) for group in self.drawn), Counter[str]())

    @property
    def reward_exposed(self) -> float:
        """Seconds of judging after the last response, on the node where it took longest: each has
        its own clock.
        """
        nodes: dict[int, list[Group]] = {}
        for group in self.drawn:
            if group.rollouts:
                nodes.setdefault(group.rollouts[0].location.node, []).append(group)
        waits = (
            max(g.scored_at for g in groups) - max(g.generated_at for g in groups)
            for groups in nodes.values()
        )
        return max(0.0, *waits, 0.0)

    def require(self, label: str, max_rejected_share: float) -> None:
        """Raise `TooManyRejected`, or `UserClassFailed`, when more than this share of the rollouts,
        or all, are lost.
        """
        lost = unusable(self.drawn)
        asked = self.rejected.total() + sum(len(group.rollouts) for group in self.drawn)
        if lost.total() > max_rejected_share * asked or lost.total() == asked:
            key = "rollout.max_rejected_share"
            first = first_reason(self.drawn)
            text = too_many(
                f"batch {label}", lost, asked, key=key, most=max_rejected_share, first=first
            )
            raise UserClassFailed(text) if lost_by_user_class(lost) else TooManyRejected(text)

    def metrics(self) -> dict[str, float]:
        """Metrics under `rollout/` and `reward/`, and the seconds of judging after the last
        response.
        """
        rollouts = [rollout for group in self.drawn for rollout in group.rollouts]
        rewards = [r.verdict.reward for r in rollouts if r.verdict.reward is not None]
        rejected = self.rejected
        values = {
            "rollout/tokens": float(self.generated_tokens),
            "rollout/samples": float(len(rollouts)),
            "rollout/rejected": float(rejected.total()),
            "reward/no_verdict": float(len(rollouts) - len(rewards)),
            "rollout/engines_left_out": float(self.engines_left_out),
            "time/reward_exposed": self.reward_exposed,
        }
        if rewards:
            values["reward/mean"] = sum(rewards) / len(rewards)
        if rollouts:
            lengths = [r.num_trainable for r in rollouts]
            values["rollout/response_length"] = sum(lengths) / len(lengths)
            values["rollout/truncated"] = sum(r.finish_reason == "length" for r in rollouts) / len(
                rollouts
            )
        return (
            values
            | dict(self.choices)
            | {f"rollout/rejected/{reason}": float(count) for reason, count in rejected.items()}
        )


@dataclass(frozen=True)
class RolloutStage:
    """Draws rollout batches from a queue.

    stop_token_ids: what ends a response. idle: called while waiting.
    """

    queue: RolloutQueue
    settings: RolloutSettings
    selector: Selector
    stop_token_ids: tuple[int, ...]
    idle: Callable[[], None]
    _parts: dict[str, list[str]] = field(
        default_factory=dict
    )  # what each group was delivered as, until it is used

    def draw(self, step: int) -> RolloutBatch:
        """Draw and judge one batch. Raises `TooManyRejected`."""
        label, drawn = f"step-{step}", dict[int, Group]()
        before, carried = self.queue.generated_tokens, set(self._parts)
        selection = self.selector.select(step)
        asks = selection.begin()
        while asks:
            asked = self._submit(label, asks)
            for group in self.queue.as_completed(self.idle):
                index = asked.pop(group.group_id).index
                drawn[index] = joined(drawn[index], group) if index in drawn else group
                self._parts.setdefault(drawn[index].group_id, []).append(group.group_id)
                if (extension := selection.answered(index, drawn[index])) is not None:
                    asked |= self._submit(label, [extension])
            asks = selection.more()
        chosen = selection.result()
        told = chosen.groups + chosen.stopped + chosen.surplus
        ended = {group.group_id: self._parts.pop(group.group_id) for group in told}
        batch = RolloutBatch(
            groups=chosen.groups,
            stopped=chosen.stopped,
            surplus=chosen.surplus,
            generated_tokens=self.queue.generated_tokens - before,
            engines_left_out=len(self.queue.engines_left_out),
            carried_in=sum(tokens_of(group) for group in told if group.group_id in carried),
            carried_out=sum(
                tokens_of(group) for group in drawn.values() if group.group_id not in ended
            ),
            delivered=tuple(part for parts in ended.values() for part in parts),
            choices=selection.metrics(),
        )
        batch.require(label, self.settings.max_rejected_share)
        return batch

    def state(self) -> SelectorState:
        return self.selector.state()

    def restore(self, state: SelectorState) -> None:
        """See `Selector`."""
        self.selector.restore(state)

    def widen(self) -> None:
        """See `Selector`."""
        self.selector.widen()

    def _submit(self, label: str, asks: Sequence[RolloutRequest]) -> dict[str, RolloutRequest]:
        """What was asked, by group id: every part of a group has its own."""
        sampling = Sampling(
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            stop_token_ids=self.stop_token_ids,
        )
        asked = {
            f"{label}-{ask.index}" + (f"+{ask.first_sample}" if ask.first_sample else ""): ask
            for ask in asks
        }
        self.queue.submit(
            [
                GroupRequest(
                    group_id=group_id,
                    prompt=ask.prompt,
                    num_samples=ask.samples,
                    first_sample=ask.first_sample,
                    sampling=sampling,
                )
                for group_id, ask in asked.items()
            ]
        )
        return asked


def tokens_of(group: Group) -> int:
    """What engines drew for it, rejected rollouts included."""
    return sum(ref.num_generated for ref in group.rollouts) + sum(group.rejected_tokens.values())


def joined(first: Group, rest: Group) -> Group:
    """One group, under the id of its first part."""
    return msgspec.structs.replace(
        first,
        rollouts=first.rollouts + rest.rollouts,
        rejections=dict(Counter(first.rejections) + Counter(rest.rejections)),
        rejected_tokens=dict(Counter(first.rejected_tokens) + Counter(rest.rejected_tokens)),
        generated_at=max(first.generated_at, rest.generated_at),
        scored_at=max(first.scored_at, rest.scored_at),
    )
