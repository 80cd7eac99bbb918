"""The result of one set of questions: accuracy and pass@k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.rollouts.evaluation.evaluation import (
    Accuracy,
    Evaluation,
    accuracy_of,
    split_by_correctness,
)
from megatron_rl.rollouts.evaluation.pass_at_k import pass_rates


@dataclass(frozen=True)
class SetResult:
    """The result of one set.

    passes: pass@k with half the width of its interval, by k. Empty without correctness.
    """

    name: str
    accuracy: Accuracy
    passes: Mapping[int, tuple[float, float]]

    def metrics(self) -> dict[str, float]:
        """Return `eval/NAME/accuracy`, `eval/NAME/pass@4`, ... and their intervals."""
        metrics = self.accuracy.metrics()
        values = {key.removeprefix("eval/"): value for key, value in metrics.items()}
        for k, (rate, half_width) in self.passes.items():
            values[f"pass@{k}"] = rate
            values[f"pass@{k}_ci95"] = half_width
        return {f"eval/{self.name}/{key}": value for key, value in values.items()}


def measure_set(name: str, evaluation: Evaluation, *, label: str) -> SetResult:
    """Sample responses to every question of a set and score them.

    label: makes group ids unique in the run. Raises `Failure`.
    """
    samples = evaluation.settings.samples_per_prompt
    groups = evaluation.sample(label)
    accuracy = accuracy_of(groups, samples)
    graded_groups, _ = split_by_correctness(groups)
    return SetResult(name, accuracy, pass_rates(graded_groups, samples))
