"""Sampled pass@1 on the held-out questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import EvalSettings, RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group, sampled_tokens
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rollouts.messages import GroupRequest
from megatron_rl.rollouts.pass_at_k import mean_ci95
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.rejections import (
    UserClassFailed,
    first_reason,
    lost_by_user_class,
    too_many,
    unusable,
)


class LostEvaluation(Failure):
    """So many responses could not be used that there is no accuracy."""

    exit_code = ExitCode.ENGINE_FAILED


@dataclass(frozen=True)
class Accuracy:
    """accuracy: mean over questions. half_width: of the 95 % confidence interval (normal, clustered
    by question).

    parseable: share of responses that end and hold a final answer. finished: share that end before
    the token limit. rejected: rollouts that could not be used, which count as wrong and as not
    finished. tokens: drawn by engines for all of it.
    """

    accuracy: float
    half_width: float
    parseable: float
    finished: float
    rejected: int
    questions: int
    samples: int
    tokens: int = 0

    def __str__(self) -> str:
        lost = f", {self.rejected} lost" if self.rejected else ""
        asked = f"{self.questions} questions x {self.samples // self.questions}"
        return f"{self.accuracy:.3f} ± {self.half_width:.3f} ({asked}, {self.parseable:.1%} parseable{lost})"

    def metrics(self) -> dict[str, float]:
        return {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_ci95": self.half_width,
            "eval/parseable": self.parseable,
            "eval/finished": self.finished,
            "eval/rejected": float(self.rejected),
            "eval/questions": float(self.questions),
        }


@dataclass(frozen=True)
class Evaluation:
    """Measures on the held-out questions.

    stop_token_ids: what ends a response. idle: called while waiting.
    """

    queue: RolloutQueue
    held_out: Sequence[Prompt]
    settings: EvalSettings
    rollout: RolloutSettings
    stop_token_ids: tuple[int, ...]
    idle: Callable[[], None]

    def measure(self, label: str) -> Accuracy:
        """Draw responses to every question and score them. label makes group ids unique in the run.

        Raises `LostEvaluation` when more than `eval.max_rejected_share` of them could not be used.
        """
        settings = self.settings
        return accuracy_of(
            self.draw(label),
            settings.samples_per_prompt,
            max_rejected_share=settings.max_rejected_share,
        )

    def draw(self, label: str) -> list[Group]:
        """Judged responses to every question, as the queue delivers them."""
        settings, rollout = self.settings, self.rollout
        sampling = Sampling(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature
            if settings.temperature is None
            else settings.temperature,
            stop_token_ids=self.stop_token_ids,
        )
        self.queue.submit(
            [
                GroupRequest(
                    group_id=f"eval-{label}-{index}",
                    prompt=prompt,
                    num_samples=settings.samples_per_prompt,
                    sampling=sampling,
                    evaluation=True,
                )
                for index, prompt in enumerate(self.held_out)
            ]
        )
        return list(self.queue.as_completed(self.idle))


def accuracy_of(
    groups: Sequence[Group], samples_per_prompt: int, *, max_rejected_share: float
) -> Accuracy:
    """Score groups of `samples_per_prompt` requested rollouts each.

    Raises `LostEvaluation`, `UserClassFailed`.
    """
    means: list[float] = []
    parsed = finished = 0
    for group in groups:
        correct = sum(s.verdict.correctness or 0.0 for s in group.rollouts)
        means.append(correct / samples_per_prompt)
        for rollout in group.rollouts:
            ended = rollout.finish_reason is FinishReason.STOP
            finished += ended
            parsed += ended and rollout.verdict.answer is not None
    questions = len(means)
    if questions == 0:
        raise ValueError("no question to evaluate on: data.num_eval must be at least 1")
    mean, half_width = mean_ci95(means)
    samples = questions * samples_per_prompt
    lost = unusable(groups)
    if lost.total() > max_rejected_share * samples or lost.total() == samples:
        key = "eval.max_rejected_share"
        first = first_reason(groups)
        text = too_many(
            "an evaluation", lost, samples, key=key, most=max_rejected_share, first=first
        )
        raise UserClassFailed(text) if lost_by_user_class(lost) else LostEvaluation(text)
    return Accuracy(
        accuracy=mean,
        half_width=half_width,
        parseable=parsed / samples,
        finished=finished / samples,
        rejected=lost.total(),
        questions=questions,
        samples=samples,
        tokens=sum(sampled_tokens(group) for group in groups),
    )
