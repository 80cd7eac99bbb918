"""Evaluation: accuracy of sampled responses (pass@1) on a set of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from megatron_rl.config.schema import EvalSettings, RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group, RolloutRef, mean_of_parts, sampled_tokens
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.credit.source_metrics import groups_by_source
from megatron_rl.rollouts.evaluation.pass_at_k import mean_ci95
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.wire.messages import GroupRequest
from megatron_rl.rollouts.wire.rejections import require_usable

# Lost responses count as incorrect: beyond this share of them, an accuracy means nothing.
MAX_REJECTED_SHARE = 0.1


@dataclass(frozen=True)
class Accuracy:
    """Result of an evaluation.

    accuracy: mean over questions. None if no response has a correctness, as with a reward model.
    half_width: of its 95 % confidence interval (normal, clustered by question).
    parseable: share of responses that end and hold a final answer.
    ended_share: share of responses that end before the token limit.
    num_rejected: rollouts that could not be used. They count as incorrect and as not ended.
    questions: number of questions.
    samples: number of responses to all questions.
    tokens: number of tokens that engines sampled for all of it.
    version: the weight version that sampled every response, None if none was sampled.
    reward: mean reward over the questions without correctness, None without such questions.
    reward_half_width: of its 95 % confidence interval.
    sources: accuracy and half width of each source of a mixture, by its name.
    parts: mean reward of each part of the verdicts, by its name.
    """

    accuracy: float | None
    half_width: float
    parseable: float
    ended_share: float
    num_rejected: int
    questions: int
    samples: int
    tokens: int = 0
    version: int | None = None
    reward: float | None = None
    reward_half_width: float = 0.0
    sources: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        losses = f", {self.num_rejected} lost" if self.num_rejected else ""
        size = f"{self.questions} questions x {self.samples // self.questions}"
        parseable = f"{self.parseable:.1%} parseable"
        by_source = "".join(
            f", {name} {accuracy:.3f} ± {half_width:.3f}"
            for name, (accuracy, half_width) in self.sources.items()
        )
        return f"{self._means()} ({size}, {parseable}{losses}{by_source})"

    def metrics(self) -> dict[str, float]:
        """Return the metrics under `eval/`. An unknown accuracy or reward has no entry."""
        means: dict[str, float] = {}
        if self.accuracy is not None:
            means["eval/accuracy"] = self.accuracy
            means["eval/accuracy_ci95"] = self.half_width
        if self.reward is not None:
            means["eval/reward"] = self.reward
            means["eval/reward_ci95"] = self.reward_half_width
        for name, (accuracy, half_width) in self.sources.items():
            means[f"eval/source/{name}/accuracy"] = accuracy
            means[f"eval/source/{name}/accuracy_ci95"] = half_width
        for name, mean in self.parts.items():
            means[f"eval/part/{name}"] = mean
        if self.version is not None:
            means["eval/version"] = float(self.version)
        return means | {
            "eval/parseable": self.parseable,
            "eval/finished": self.ended_share,
            "eval/rejected": float(self.num_rejected),
            "eval/questions": float(self.questions),
        }

    def _means(self) -> str:
        accuracy = "unknown"
        if self.accuracy is not None:
            accuracy = f"{self.accuracy:.3f} ± {self.half_width:.3f}"
        if self.reward is None:
            return accuracy
        return f"{accuracy}, reward {self.reward:.3f} ± {self.reward_half_width:.3f}"


def _ignore(groups: Sequence[Group]) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Evaluation:
    """Samples and scores responses to prompts.

    stop_token_ids: tokens that end a response.
    idle: called regularly while rollouts are running. observe: called with all groups.
    """

    queue: RolloutQueue
    prompts: Sequence[Prompt]
    settings: EvalSettings
    rollout: RolloutSettings
    stop_token_ids: tuple[int, ...]
    idle: Callable[[], None]
    observe: Callable[[Sequence[Group]], None] = _ignore

    def measure(self, label: str) -> Accuracy:
        """Sample responses to every prompt and score them.

        label: makes group ids unique in the run.
        Raises `Failure` when more than `MAX_REJECTED_SHARE` of them could not be used.
        """
        return accuracy_of(self.sample(label), self.settings.samples_per_prompt)

    def sample(self, label: str) -> list[Group]:
        """Sample responses to every prompt and return the groups in the order of the prompts.

        Sums over groups depend on the order of their terms, so the order of completion must not
        decide it.
        """
        temperature = self.settings.temperature
        if temperature is None:
            temperature = self.rollout.temperature
        sampling = Sampling(
            max_new_tokens=self.settings.max_new_tokens or self.rollout.max_new_tokens,
            temperature=temperature,
            top_p=self.settings.top_p,
            stop_token_ids=self.stop_token_ids,
        )
        requests = [
            GroupRequest(
                group_id=f"eval-{label}-{index}",
                prompt=prompt,
                num_samples=self.settings.samples_per_prompt,
                sampling=sampling,
                evaluation=True,
            )
            for index, prompt in enumerate(self.prompts)
        ]
        self.queue.submit(requests)
        index_by_id = {request.group_id: index for index, request in enumerate(requests)}
        try:
            groups = list(self.queue.as_completed(self.idle, is_wanted=index_by_id.__contains__))
        except Exception:
            # A checkpoint may follow. It stores no responses of an evaluation
            self.queue.drop(list(index_by_id))
            raise
        groups.sort(key=lambda group: index_by_id[group.group_id])
        self.observe(groups)
        return groups


def accuracy_of(
    groups: Sequence[Group],
    samples_per_prompt: int,
    *,
    max_rejected_share: float = MAX_REJECTED_SHARE,
) -> Accuracy:
    """Compute the accuracy of groups of `samples_per_prompt` requested rollouts each.

    Groups without correctness count in the mean reward, and not in the accuracy.

    Raises `Failure` when more than `max_rejected_share` of the
    rollouts could not be used, also for responses of several weight versions, and
    ValueError without groups.
    """
    if not groups:
        raise ValueError("no question to evaluate on: data.num_eval must be at least 1")
    graded_groups, judged_groups = split_by_correctness(groups)
    accuracy = _mean_correctness(graded_groups, samples_per_prompt)
    reward = _mean_reward(judged_groups)
    num_samples = len(groups) * samples_per_prompt
    losses = require_usable(
        groups,
        num_samples,
        subject="an evaluation",
        limit=max_rejected_share,
        failure=partial(Failure, exit_code=ExitCode.ENGINE_FAILED),
    )
    endings = [rollout for group in groups for rollout in group.rollouts if _is_ended(rollout)]
    num_parseable = sum(rollout.verdict.answer is not None for rollout in endings)
    return Accuracy(
        accuracy=accuracy[0] if accuracy else None,
        half_width=accuracy[1] if accuracy else 0.0,
        parseable=num_parseable / num_samples,
        ended_share=len(endings) / num_samples,
        num_rejected=losses.total(),
        questions=len(groups),
        samples=num_samples,
        tokens=sum(sampled_tokens(group) for group in groups),
        version=_version_of(groups),
        reward=reward[0] if reward else None,
        reward_half_width=reward[1] if reward else 0.0,
        sources=_accuracy_by_source(graded_groups, samples_per_prompt),
        parts=mean_of_parts(rollout for group in groups for rollout in group.rollouts),
    )


def _version_of(groups: Sequence[Group]) -> int | None:
    """Return the weight version of all responses, None if none was sampled.

    The queue rejects responses of other versions than the current one.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    versions = sorted({version for rollout in rollouts for version in rollout.versions})
    if len(versions) > 1:
        raise Failure(
            f"an evaluation has responses of the weight versions {versions}: its accuracy would "
            "belong to none of them",
            ExitCode.ENGINE_FAILED,
        )
    return versions[0] if versions else None


def split_by_correctness(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Return the groups with a correctness, and those whose scorer gave rewards alone.

    A group without any verdict is among the first. If every group with a verdict is among the
    second, it is among them too.
    """
    judged_groups = [group for group in groups if _is_judged(group)]
    graded_groups = [group for group in groups if not _is_judged(group)]
    if judged_groups and not any(group.rollouts_with_verdict for group in graded_groups):
        return [], list(groups)
    return graded_groups, judged_groups


def _is_judged(group: Group) -> bool:
    """Return True for a group whose verdicts have rewards and no correctness."""
    verdicts = [rollout.verdict for rollout in group.rollouts_with_verdict]
    return bool(verdicts) and all(verdict.correctness is None for verdict in verdicts)


def _mean_correctness(groups: Sequence[Group], samples: int) -> tuple[float, float] | None:
    """Return the mean and half width, None without groups. Missing rollouts are incorrect."""
    if not groups:
        return None
    return mean_ci95([_correctness(group) / samples for group in groups])


def _accuracy_by_source(groups: Sequence[Group], samples: int) -> dict[str, tuple[float, float]]:
    return {
        name: mean_ci95([_correctness(group) / samples for group in members])
        for name, members in groups_by_source(groups).items()
    }


def _mean_reward(groups: Sequence[Group]) -> tuple[float, float] | None:
    """Return the mean and half width, None without rewards. Missing rollouts do not count."""
    means = []
    for group in groups:
        rollouts = group.rollouts_with_verdict
        if rollouts:
            means.append(sum(rollout.verdict.reward or 0.0 for rollout in rollouts) / len(rollouts))
    return mean_ci95(means) if means else None


def _correctness(group: Group) -> float:
    return sum(rollout.verdict.correctness or 0.0 for rollout in group.rollouts)


def _is_ended(rollout: RolloutRef) -> bool:
    return rollout.finish_reason is FinishReason.STOP
