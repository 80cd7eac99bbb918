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


class NothingCameBack(Failure):
    """Every sample of a batch was rejected: going on would train on nothing for ever."""

    exit_code = ExitCode.ENGINE_FAILED


@dataclass(frozen=True)
class RolloutBatch:
    """Groups in the order of their prompts, and the tokens that were generated for them."""

    groups: tuple[Group, ...]
    generated_tokens: int

    @property
    def group_ids(self) -> list[str]:
        return [group.group_id for group in self.groups]

    @property
    def rejected(self) -> Counter[str]:
        """Samples without a rollout, by reason."""
        return sum((Counter(group.rejected) for group in self.groups), Counter[str]())

    def metrics(self) -> dict[str, float]:
        """Metrics under `rollout/` and `reward/`, and the seconds of judging after the last response."""
        samples = [sample for group in self.groups for sample in group.rollouts]
        rewards = [s.verdict.reward for s in samples if s.verdict.reward is not None]
        rejected = self.rejected
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


@dataclass(frozen=True)
class RolloutStage:
    """Draws rollout batches from a queue. stop_token_ids: what ends a response. idle: called while waiting."""

    queue: RolloutQueue
    settings: RolloutSettings
    stop_token_ids: tuple[int, ...]
    idle: Callable[[], None]

    def draw(self, label: str, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Draw and judge one batch. label makes group ids unique in the run. Raises `NothingCameBack`."""
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
        batch = RolloutBatch(groups, self.queue.generated_tokens - before)
        if not any(group.rollouts for group in groups):
            raise NothingCameBack(
                f"all samples of batch {label} were rejected: {dict(batch.rejected)}; see the engines' and the "
                "collectors' logs"
            )
        return batch
