"""Prompts in, judged groups out: one rollout batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.rollouts.messages import GroupRequest
from megatron_rl.rollouts.queue import RolloutQueue


class NothingCameBack(RuntimeError):
    """Every sample of a batch was rejected: going on would train on nothing for ever."""


@dataclass(frozen=True)
class RolloutBatch:
    """Groups in the order of their prompts, and the tokens that were generated for them."""

    groups: tuple[Group, ...]
    generated_tokens: int

    @property
    def group_ids(self) -> list[str]:
        return [group.group_id for group in self.groups]

    def metrics(self) -> dict[str, float]:
        """The names of design section 4 under `rollout/` and `reward/`, and exposed reward time."""
        samples = [sample for group in self.groups for sample in group.samples]
        rewards = [s.verdict.reward for s in samples if s.verdict.reward is not None]
        rejected = sum((Counter(group.rejected) for group in self.groups), Counter[str]())
        generated = max((group.generated_at for group in self.groups), default=0.0)
        judged = max((group.judged_at for group in self.groups), default=0.0)
        values = {
            "rollout/tokens": float(self.generated_tokens),
            "rollout/samples": float(len(samples)),
            "rollout/rejected": float(rejected.total()),
            "reward/no_verdict": float(len(samples) - len(rewards)),
            "time/reward_exposed": max(0.0, judged - generated),
        }
        if rewards:
            values["reward/mean"] = sum(rewards) / len(rewards)
        if samples:
            lengths = [s.num_trainable for s in samples]
            values["rollout/response_length"] = sum(lengths) / len(lengths)
            values["rollout/truncated"] = sum(s.finish_reason == "length" for s in samples) / len(samples)
        return values | {f"rollout/rejected/{reason}": float(count) for reason, count in rejected.items()}


def roll_out(
    producer: RolloutQueue,
    prompts: Sequence[Prompt],
    *,
    label: str,
    samples_per_prompt: int,
    sampling: Sampling,
    idle: Callable[[], None],
) -> RolloutBatch:
    """Draw and judge one batch. label makes group ids unique in the run. Raises `NothingCameBack`."""
    order = {f"{label}-{index}": index for index in range(len(prompts))}
    before = producer.generated_tokens
    producer.submit(
        [
            GroupRequest(group_id=group_id, prompt=prompts[index], num_samples=samples_per_prompt, sampling=sampling)
            for group_id, index in order.items()
        ]
    )
    groups = sorted(producer.as_completed(idle), key=lambda group: order[group.group_id])
    batch = RolloutBatch(tuple(groups), producer.generated_tokens - before)
    if not any(group.samples for group in groups):
        reasons = sum((Counter(group.rejected) for group in groups), Counter[str]())
        raise NothingCameBack(f"all samples of batch {label} were rejected: {dict(reasons)}; see the engines' logs")
    return batch
