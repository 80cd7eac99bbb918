"""Rollout batches: the groups of one training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group, RolloutRef, mean_of_parts
from megatron_rl.credit.source_metrics import source_metrics
from megatron_rl.prompts.selection.restored_step import RestoredStep
from megatron_rl.prompts.selection.selector import SelectionResult
from megatron_rl.rollouts.steps.step_sampling import StepSampling
from megatron_rl.rollouts.wire.rejections import NON_FINITE, count_unusable, require_usable

# What is left of a batch that has lost more is a selection by chance.
MAX_REJECTED_SHARE = 0.5


class TooManyRejected(Failure):
    """Too many rollouts of a batch could not be used. The rest would be an accidental selection."""

    exit_code = ExitCode.ENGINE_FAILED


@dataclass(frozen=True)
class RolloutBatch:
    """Groups of one training step.

    groups: to be credited, in the order of their prompts.
    stopped_groups, surplus_groups: sampled, but not to be credited (see `SelectionResult`).
    generated_tokens: tokens that engines sampled during this step.
    engines_left_out: number of engines that get no requests at the end, because they failed.
    delivered_ids: ids under which the rollouts have to be released.
    sampling: has the parts of groups that came under these ids, and decides on those that come
    again. None for a recording.
    num_repeated: requests that were sent again, because a collector was gone.
    selection_metrics: of the prompt selection.
    unused_tokens: tokens of groups that the step neither needed nor kept, by class in the account.
    """

    groups: tuple[Group, ...]
    generated_tokens: int
    engines_left_out: int = 0
    stopped_groups: tuple[Group, ...] = ()
    surplus_groups: tuple[Group, ...] = ()
    delivered_ids: tuple[str, ...] = ()
    sampling: StepSampling | None = None
    num_repeated: int = 0
    selection_metrics: Mapping[str, float] = field(default_factory=dict)
    unused_tokens: Mapping[str, int] = field(default_factory=dict)

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
        several clocks, and is not counted.
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

    def restored(self, step: int) -> RolloutBatch:
        """Return the batch of a checkpoint with a sampling, which has its groups."""
        result = SelectionResult(self.groups, self.stopped_groups, self.surplus_groups)
        selection = RestoredStep(result, self.selection_metrics)
        return replace(self, sampling=StepSampling.restored(step, selection))

    def require(self, label: str) -> None:
        """Raise `TooManyRejected` or `UserClassFailed` when too many rollouts are unusable.

        Raises its subclass `NonFiniteResponses` if NaN is the cause of most.
        """
        num_rollouts = sum(len(group.rollouts) for group in self.all_groups)
        try:
            require_usable(
                self.all_groups,
                self.rejections.total() + num_rollouts,
                subject=f"batch {label}",
                limit=MAX_REJECTED_SHARE,
                failure=TooManyRejected,
            )
        except TooManyRejected as failure:
            losses = count_unusable(self.all_groups)
            if 2 * losses[NON_FINITE] > losses.total():
                raise NonFiniteResponses(str(failure)) from None
            raise

    def age_metrics(self, version: int) -> dict[str, float]:
        """Return the ages of the sampled tokens in weight versions, under `rollout/age/`.

        version: of the weights that train on them. Empty without sampled tokens.
        """
        tokens_by_age = Counter[int]()
        for group in self.all_groups:
            for rollout in group.rollouts:
                for token_version, num_tokens in rollout.tokens_by_version:
                    tokens_by_age[version - token_version] += num_tokens
        num_tokens = tokens_by_age.total()
        if not num_tokens:
            return {}
        sum_of_ages = sum(age * count for age, count in tokens_by_age.items())
        return {
            "rollout/age/mean": sum_of_ages / num_tokens,
            "rollout/age/max": float(max(tokens_by_age)),
            **{f"rollout/age/{age}": float(count) for age, count in tokens_by_age.items()},
        }

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
    """Most of the rollouts that cannot be used have log-probabilities that are NaN or infinite."""


def _reward_metrics(rollouts: Sequence[RolloutRef]) -> dict[str, float]:
    rewards = [r.verdict.reward for r in rollouts if r.verdict.reward is not None]
    values = {"reward/no_verdict": float(len(rollouts) - len(rewards))}
    if rewards:
        values["reward/mean"] = sum(rewards) / len(rewards)
    for name, mean in mean_of_parts(rollouts).items():
        values[f"reward/part/{name}"] = mean
    return values


def _length_metrics(rollouts: Sequence[RolloutRef]) -> dict[str, float]:
    if not rollouts:
        return {}
    num_truncated = sum(r.finish_reason == "length" for r in rollouts)
    values = {
        "rollout/response_length": sum(r.num_trainable for r in rollouts) / len(rollouts),
        "rollout/truncated": num_truncated / len(rollouts),
    }
    num_repetitive = sum(r.is_repetitive for r in rollouts)
    if num_repetitive:
        values["rollout/stopped_repetition"] = num_repetitive / len(rollouts)
    return values
