"""Prompts in, judged groups out: one rollout batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.rollouts.messages import GroupRequest
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.rejections import OwnClassFailed, first_reason, lost_by_own_class, too_many, unusable


class TooManyRejected(Failure):
    """So many rollouts of a batch could not be used that going on would train on what is left by accident."""

    exit_code = ExitCode.ENGINE_FAILED


@dataclass(frozen=True)
class RolloutBatch:
    """Groups in the order of their prompts, and the tokens that were generated for them.

    engines_left_out: how many engines were not asked any more at the end, because they failed.
    """

    groups: tuple[Group, ...]
    generated_tokens: int
    engines_left_out: int = 0

    @property
    def group_ids(self) -> list[str]:
        return [group.group_id for group in self.groups]

    @property
    def rejected(self) -> Counter[str]:
        """Rollouts that were asked for and could not be used, by reason."""
        return sum((Counter(group.rejected) for group in self.groups), Counter[str]())

    @property
    def reward_exposed(self) -> float:
        """Seconds of judging after the last response, on the node where it took longest: each has its own clock."""
        nodes: dict[int, list[Group]] = {}
        for group in self.groups:
            if group.rollouts:
                nodes.setdefault(group.rollouts[0].location.node, []).append(group)
        waits = (max(g.judged_at for g in groups) - max(g.generated_at for g in groups) for groups in nodes.values())
        return max(0.0, *waits, 0.0)

    def require(self, label: str, max_rejected_share: float) -> None:
        """Raise `TooManyRejected`, or `OwnClassFailed`, when more than this share of the rollouts, or all, are lost."""
        lost = unusable(self.groups)
        asked = self.rejected.total() + sum(len(group.rollouts) for group in self.groups)
        if lost.total() > max_rejected_share * asked or lost.total() == asked:
            key = "rollout.max_rejected_share"
            first = first_reason(self.groups)
            text = too_many(f"batch {label}", lost, asked, key=key, most=max_rejected_share, first=first)
            raise OwnClassFailed(text) if lost_by_own_class(lost) else TooManyRejected(text)

    def metrics(self) -> dict[str, float]:
        """Metrics under `rollout/` and `reward/`, and the seconds of judging after the last response."""
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
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
            values["rollout/truncated"] = sum(r.finish_reason == "length" for r in rollouts) / len(rollouts)
        return values | {f"rollout/rejected/{reason}": float(count) for reason, count in rejected.items()}


@dataclass(frozen=True)
class RolloutStage:
    """Draws rollout batches from a queue. stop_token_ids: what ends a response. idle: called while waiting."""

    queue: RolloutQueue
    settings: RolloutSettings
    stop_token_ids: tuple[int, ...]
    idle: Callable[[], None]

    def draw(self, label: str, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Draw and judge one batch. label makes group ids unique in the run. Raises `TooManyRejected`."""
        sampling = Sampling(
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            stop_token_ids=self.stop_token_ids,
        )
        requests = [
            GroupRequest(
                group_id=f"{label}-{index}",
                prompt=prompt,
                num_samples=self.settings.samples_per_prompt,
                sampling=sampling,
            )
            for index, prompt in enumerate(prompts)
        ]
        before = self.queue.generated_tokens
        self.queue.submit(requests)
        done = {group.group_id: group for group in self.queue.as_completed(self.idle)}
        groups = tuple(done[request.group_id] for request in requests)
        batch = RolloutBatch(groups, self.queue.generated_tokens - before, len(self.queue.engines_left_out))
        batch.require(label, self.settings.max_rejected_share)
        return batch
