"""Sampled pass@1 on the held-out questions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import EvalSettings, RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rollouts.messages import ENGINE_FAILURE, GroupRequest
from megatron_rl.rollouts.queue import RolloutQueue

_NORMAL_95 = 1.959964


class LostEvaluation(Failure):
    """An engine failed to answer evaluation requests, so there is no accuracy."""

    exit_code = ExitCode.ENGINE_FAILED


@dataclass(frozen=True)
class Accuracy:
    """accuracy: mean over questions. half_width: of the 95 % confidence interval (normal, clustered by question).

    parseable: share of responses that end and hold a final answer. finished: share that end before the token limit.
    rejected: samples that could not be used, which count as wrong.
    """

    accuracy: float
    half_width: float
    parseable: float
    finished: float
    rejected: int
    questions: int
    samples: int

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
    """Measures on the held-out questions. stop_token_ids: what ends a response. idle: called while waiting."""

    queue: RolloutQueue
    held_out: Sequence[Prompt]
    settings: EvalSettings
    rollout: RolloutSettings
    stop_token_ids: tuple[int, ...]
    idle: Callable[[], None]

    def measure(self, label: str) -> Accuracy:
        """Draw responses to every question and score them. label makes group ids unique in the run.

        Raises `LostEvaluation` when an engine did not answer a request: that is no wrong answer.
        """
        settings, rollout = self.settings, self.rollout
        sampling = Sampling(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature if settings.temperature is None else settings.temperature,
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
        return accuracy_of(self.queue.as_completed(self.idle), settings.samples_per_prompt)


def accuracy_of(groups: Iterable[Group], samples_per_prompt: int) -> Accuracy:
    """Score groups of `samples_per_prompt` requested samples each."""
    means: list[float] = []
    parsed = finished = rejected = 0
    for group in groups:
        if group.rejected.get(ENGINE_FAILURE):
            raise LostEvaluation(
                f"{group.rejected[ENGINE_FAILURE]} requests of evaluation group {group.group_id} got no answer; see "
                "the engines' logs, or raise engine.request_timeout_s and engine.retries"
            )
        rejected += sum(group.rejected.values())
        correct = sum(s.verdict.correctness or 0.0 for s in group.rollouts)
        means.append(correct / samples_per_prompt)
        for sample in group.rollouts:
            ended = sample.finish_reason is FinishReason.STOP
            finished += ended
            parsed += ended and sample.verdict.answer is not None
    questions = len(means)
    if questions == 0:
        raise ValueError("no question to evaluate on: data.num_eval must be at least 1")
    mean = sum(means) / questions
    variance = sum((m - mean) ** 2 for m in means) / max(1, questions - 1)
    samples = questions * samples_per_prompt
    return Accuracy(
        accuracy=mean,
        half_width=_NORMAL_95 * math.sqrt(variance / questions),
        parseable=parsed / samples,
        finished=finished / samples,
        rejected=rejected,
        questions=questions,
        samples=samples,
    )
